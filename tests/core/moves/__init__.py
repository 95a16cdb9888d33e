"""Tests of kvplace.core.moves."""
