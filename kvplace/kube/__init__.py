"""Kubernetes: the only package that talks to an API server.

`api_cluster` and `memory_cluster` offer the same calls, `watches` lists the kinds that can be watched, and
`object_records` their records. `store`, `ledgers` and `events` stand on them. Nothing here decides
about cores.
"""
