"""How much of a cluster is in use, and how much of the rest is stranded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.topology import Topology


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster at one moment, in shares of what the empty cluster can give out.

    A free CPU is stranded where its node has too little memory left to go with it, in the proportion in
    which the VMs together ask for both; free memory is stranded where too few CPUs are left to go with it.
    Memory is counted outside huge pages. Nodes of unknown memory strand nothing.
    """

    cpus_used: float
    memory_used: float
    cpus_stranded: float
    memory_stranded: float


def cluster_state(nodes: Iterable[tuple[Topology, Free]], memory_per_cpu: float) -> ClusterState:
    """Measure nodes by what is free on them, for VMs that request so many bytes per CPU."""
    cpus = free_cpus = memory = free_memory = 0
    stranded_cpus = stranded_memory = 0.0
    for topology, free in nodes:
        own_cpus, own_memory = empty_amounts(topology)
        left_cpus = free.cpus.bit_count()
        left_memory = sum(max(0, count) for _, count in free.memory)
        cpus += own_cpus
        memory += own_memory
        free_cpus += left_cpus
        free_memory += left_memory
        if own_memory and memory_per_cpu:
            stranded_cpus += max(0.0, left_cpus - left_memory / memory_per_cpu)
            stranded_memory += max(0.0, left_memory - left_cpus * memory_per_cpu)
    return ClusterState(
        cpus_used=1 - free_cpus / max(1, cpus),
        memory_used=1 - free_memory / max(1, memory),
        cpus_stranded=stranded_cpus / max(1, cpus),
        memory_stranded=stranded_memory / max(1, memory),
    )


@cache
def empty_amounts(topology: Topology) -> tuple[int, int]:
    """Count the CPUs, and the bytes outside huge pages, that an empty machine can give out."""
    free = free_of(topology, Ledger())
    return free.cpus.bit_count(), sum(count for _, count in free.memory)
