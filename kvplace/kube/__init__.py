"""Kubernetes: the one room that talks to an API server; everybody else sees records and a small port.

`cluster` is the port, `records` what travels through it, `api_cluster` and `memory_cluster` its two sides,
`store` a synced cache on top. Nothing here decides anything about cores.
"""
