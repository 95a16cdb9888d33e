"""Tests of the hook sidecar."""
