"""Katalyst's L3 best fit, inside the NUMA nodes that its caller names.

As its caller stands the TopologyManager's hint, which is what the kubelet's plugins get.
"""

from __future__ import annotations

from benchmarks.peers.best_fit import by_l3
from benchmarks.peers.kubelet import with_numa_mask
from kvplace.core.topology import Topology


def katalyst(topology: Topology, free: int, count: int) -> int | None:
    """The tightest L3 group that suffices, else the largest and then again."""
    return with_numa_mask(topology, free, count, take=_best_l3_groups)


def _best_l3_groups(topology: Topology, free: int, count: int) -> int | None:
    return by_l3(topology, free, count) if free.bit_count() >= count else None
