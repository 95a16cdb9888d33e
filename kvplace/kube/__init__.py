"""Kubernetes: the only package that talks to an API server.

`api_cluster` and `memory_cluster` offer the same calls, `watches` states what can be watched, `records` what
an object becomes. `store`, `ledgers` and `events` stand on them. Nothing here decides about cores.
"""
