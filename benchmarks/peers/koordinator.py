"""Koordinator's CPU accumulator with bind policy FullPCPUs, most and least allocated.

The first NUMA node with enough whole free cores, in the strategy's order, then the first such socket,
then the largest sockets one after the other, then single CPUs. L3 groups and distances are not checked.
"""

from __future__ import annotations

from kvplace.core.cpuset import cpus_of, lowest
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import Topology


def most_allocated(topology: Topology, free: int, count: int) -> int | None:
    """The fullest NUMA node that suffices."""
    return _take(topology, free, count, sign=1)


def least_allocated(topology: Topology, free: int, count: int) -> int | None:
    """The emptiest NUMA node."""
    return _take(topology, free, count, sign=-1)


def _take(topology: Topology, free: int, count: int, *, sign: int) -> int | None:
    if free.bit_count() < count:
        return None
    whole = 0
    for core in topology.cores:
        if core & ~free == 0:
            whole |= core
    nodes = [(node.id, node.cpus & whole) for node in topology.numa_nodes]
    sockets = [(package.id, package.cpus & whole) for package in topology.packages]
    for level in (nodes, sockets):
        for _, cpus in sorted(level, key=lambda unit: (sign * unit[1].bit_count(), unit[0])):
            if cpus.bit_count() >= count:
                return _lowest_cores(topology, cpus, count)
    taken = 0
    for _, cpus in sorted(sockets, key=lambda unit: (-unit[1].bit_count(), unit[0])):
        taken |= _lowest_cores(topology, cpus, count - taken.bit_count())
    for cpu in cpus_of(CpuMask(free & ~taken)):
        if taken.bit_count() < count:
            taken |= 1 << cpu
    return taken


def _lowest_cores(topology: Topology, cpus: int, count: int) -> int:
    taken = 0
    for core in topology.cores:
        if core & cpus:
            taken |= lowest(core & cpus, count - taken.bit_count())
    return taken
