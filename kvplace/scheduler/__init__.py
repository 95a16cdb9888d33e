"""The scheduler extender: which node, which cores, and the one write that binds them.

Filter and prioritize answer from memory; cores are claimed in bind only, in the node's ledger, before
the pod is bound.
"""
