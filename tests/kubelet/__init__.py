"""The kubelet's podresources."""
