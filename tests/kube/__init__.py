"""Contracts and faults of the Kubernetes room."""
