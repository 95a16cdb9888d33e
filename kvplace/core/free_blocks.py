"""The largest free block of a machine in each scope, and how scattered its free CPUs are.

A free block is what is free inside one socket, NUMA node or L3 group. Only counted: whether a certain VM
fits, with its memory and its threads, is the allocator's answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.core.topology import Topology


class Domain(Enum):
    """The kind of domain around a free block; the values are labels of metrics."""

    SOCKET = "socket"
    NUMA = "numa"
    L3 = "l3"


@dataclass(frozen=True, slots=True)
class FreeBlock:
    """The most that is free inside one domain of a kind."""

    cpus: int
    cores: int
    """Whole free cores of the domain that has most of them; perhaps not the one with most CPUs."""
    possible: int
    """CPUs of the largest free block that as many free CPUs could form on this machine."""

    @property
    def fragmentation(self) -> float:
        """How much of that is missing, from 0 to 1; 0 where nothing is free."""
        return 1 - self.cpus / self.possible if self.possible else 0.0


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """The number of free CPUs of one machine, and its largest free blocks."""

    allocatable: int
    free: int
    largest: Mapping[Domain, FreeBlock]


def free_blocks_of(topology: Topology, allocatable: CpuMask, free: CpuMask) -> FreeBlocks:
    """Count what is free, and the largest free block of every kind of domain."""
    whole_cores = NO_CPUS  # each by one of its CPUs
    for core in topology.cores:
        if core & free == core:
            whole_cores |= CpuMask(core & -core)
    count = free.bit_count()
    return FreeBlocks(
        allocatable.bit_count(),
        count,
        {
            domain: _largest(sets, allocatable, free, whole_cores, count)
            for domain, sets in (
                (Domain.SOCKET, [socket.cpus for socket in topology.sockets]),
                (Domain.NUMA, [node.cpus for node in topology.numa_nodes]),
                (Domain.L3, topology.l3_groups),
            )
        },
    )


def _largest(
    sets: Iterable[CpuMask], allocatable: CpuMask, free: CpuMask, whole_cores: CpuMask, count: int
) -> FreeBlock:
    cpus = cores = size = 0
    for of_domain in sets:
        cpus = max(cpus, (of_domain & free).bit_count())
        cores = max(cores, (of_domain & whole_cores).bit_count())
        size = max(size, (of_domain & allocatable).bit_count())
    return FreeBlock(cpus, cores, min(count, size))
