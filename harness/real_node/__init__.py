"""A real node on this machine: container runtime, kubelet and KubeVirt's node components in a sandbox."""
