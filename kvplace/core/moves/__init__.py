"""Which running VMs would have to move, or what of a request to change, so that a VM fits."""
