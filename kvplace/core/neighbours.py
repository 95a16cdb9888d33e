"""The other VMs that share hardware with a VM, and how closely: they can slow it down.

Two VMs on one core compete for its execution units, in one L3 cache for its space, on one NUMA node for
memory bandwidth. The smallest domain that two have in common includes the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvplace.core.cpuset import union
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.scalars import CpuMask, PodUid
from kvplace.core.topology import Topology


class Nearness(Enum):
    """The smallest thing that two VMs share, the nearest first."""

    CPU = "the same CPUs"
    CORE = "siblings of the same cores"
    L3 = "the same L3 cache"
    NUMA = "the same NUMA node"
    SOCKET = "the same socket"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another VM or pod on the machine."""

    claim: Claim
    nearness: Nearness
    shared: CpuMask
    """Its CPUs inside the shared domain."""


def neighbours_of(uid: PodUid, cpus: CpuMask, topology: Topology, ledger: Ledger) -> tuple[Neighbour, ...]:
    """Find the VMs that use the same CPUs, cores, L3 caches, NUMA nodes and sockets as a VM, nearest first.

    Each neighbour is listed once, with the nearest that it shares. A VM elsewhere on the machine is none.
    """
    reaches = (
        (Nearness.CPU, cpus),
        (Nearness.CORE, _reach(topology.cores, cpus)),
        (Nearness.L3, _reach(topology.l3_groups, cpus)),
        (Nearness.NUMA, _reach((node.cpus for node in topology.numa_nodes), cpus)),
        (Nearness.SOCKET, _reach((package.cpus for package in topology.packages), cpus)),
    )
    found = []
    for claim in ledger.claims.values():
        if claim.uid == uid:
            continue
        for nearness, reach in reaches:
            if shared := CpuMask((claim.cpus | claim.owned) & reach):
                found.append(Neighbour(claim, nearness, shared))
                break
    order = list(Nearness)
    return tuple(
        sorted(found, key=lambda one: (order.index(one.nearness), one.claim.namespace, one.claim.pod))
    )


def _reach(sets: Iterable[CpuMask], cpus: CpuMask) -> CpuMask:
    """Unite the sets where a VM has CPUs."""
    return union(one for one in sets if one & cpus)
