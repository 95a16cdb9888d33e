"""Tests of kvplace.core.room."""
