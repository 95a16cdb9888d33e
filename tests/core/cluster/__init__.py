"""Tests of kvplace.core.cluster."""
