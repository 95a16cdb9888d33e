"""Machines recorded from real hosts, each read once for all tests of a run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kvplace.core.topology_levels import Discovery
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import open_tree


@cache
def recorded_machine(path: Path) -> Discovery:
    """Read a captured archive."""
    return discover(open_tree(path))
