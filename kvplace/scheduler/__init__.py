"""The scheduler extender: chooses node and cores, claims the cores and binds the pod.

Filter and prioritize answer from memory. Only bind writes: first the claim in the node's ledger, then the
binding.
"""
