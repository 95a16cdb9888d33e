"""Tests of kvplace.core.allocator."""
