"""Commands on a live cluster, run against the real API server."""
