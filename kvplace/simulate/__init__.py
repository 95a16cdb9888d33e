"""Machines and VMs to try kvplace on without a cluster: well-known server types and templates of VMs."""
