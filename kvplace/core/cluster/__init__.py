"""Many nodes: which one a VM goes to, and many VMs planned together."""
