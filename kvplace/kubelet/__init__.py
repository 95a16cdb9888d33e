"""The kubelet's podresources socket: gRPC over a unix socket, in asyncio."""
