"""Tests of admission: pure decisions, the wire, the manifests, and all of it behind a real API server."""
