"""How a VM that is bound sits on its machine, and who sits beside it: pure, over one node's ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvplace.core.cpuset import union
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.placement import Placement
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
    """Its CPUs that are within what both share."""


def neighbours(
    topology: Topology, placement: Placement, uid: PodUid, ledger: Ledger
) -> tuple[Neighbour, ...]:
    """Find who uses the same CPUs, cores, L3 caches, NUMA nodes and sockets as a VM, the nearest first.

    Each neighbour is listed once, with the nearest that it shares. A VM elsewhere on the machine is none.
    """
    mine = CpuMask(placement.cpus | placement.owned)
    reaches = tuple(
        (nearness, _reach(sets, mine))
        for nearness, sets in (
            (Nearness.CORE, topology.cores),
            (Nearness.L3, topology.l3_groups),
            (Nearness.NUMA, [node.cpus for node in topology.numa_nodes]),
            (Nearness.SOCKET, [package.cpus for package in topology.packages]),
        )
    )
    found = []
    for claim in ledger.claims.values():
        if claim.uid == uid:
            continue
        theirs = CpuMask(claim.cpus | claim.owned)
        for nearness, reach in ((Nearness.CPU, mine), *reaches):
            if shared := CpuMask(theirs & reach):
                found.append(Neighbour(claim, nearness, shared))
                break
    order = list(Nearness)
    return tuple(
        sorted(found, key=lambda one: (order.index(one.nearness), one.claim.namespace, one.claim.pod))
    )


def _reach(sets: Iterable[CpuMask], mine: CpuMask) -> CpuMask:
    """Unite the sets in which a VM has CPUs."""
    return union(one for one in sets if one & mine)
