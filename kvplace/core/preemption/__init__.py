"""Preemption: which VMs of lower priority have to go so that a VM fits its scope."""
