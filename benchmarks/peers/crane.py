"""Crane: the scheduler counts CPUs by NUMA node, worst fit, and the agent picks them later, packed."""

from __future__ import annotations

from benchmarks.peers.kubelet import packed
from kvplace.core.topology import Topology


def crane(topology: Topology, free: int, count: int) -> int | None:
    """The NUMA nodes with most free CPUs first, as many of them as it takes."""
    if free.bit_count() < count:
        return None
    taken = 0
    nodes = [((node.cpus & free).bit_count(), node) for node in topology.numa_nodes]
    for size, node in sorted(nodes, key=lambda pair: (-pair[0], pair[1].id)):
        share = min(size, count - taken.bit_count())
        if share:
            taken |= packed(topology, node.cpus & free, share) or 0
    return taken
