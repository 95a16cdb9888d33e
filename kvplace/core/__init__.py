"""Values and decisions: pure Python, no I/O, no clock, no third-party import.

Equal inputs give equal outputs. So the extender, the hook and the offline commands agree on a VM's cores
without talking to each other.
"""
