"""Tests of kvplace.core.drawing.core_map."""
