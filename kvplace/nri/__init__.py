"""The Node Resource Interface (NRI) of containerd and CRI-O: the protocol of its plugins, in asyncio."""
