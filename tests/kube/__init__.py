"""The Kubernetes package: contracts of both clusters, caches, ledgers, and faults."""
