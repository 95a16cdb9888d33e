"""How others choose CPUs: plain re-implementations to compare with.

Each is our own implementation of the documented or published behaviour, and reads like that description;
none is the other's own code. They share one form: a machine, its free CPUs and a count in, a set of CPUs
out, None when the other would refuse. What a peer gets wrong is kept: kubelet's averages may hand out CPUs
that are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.peers.best_fit import best_fit
from benchmarks.peers.crane import crane
from benchmarks.peers.katalyst import katalyst
from benchmarks.peers.koordinator import least_allocated, most_allocated
from benchmarks.peers.kubelet import distributed, packed, packed_by_l3, with_numa_mask
from kvplace.core.topology import Topology

Allocator = Callable[[Topology, int, int], int | None]
"""(machine, free CPUs, CPUs wanted) to the CPUs chosen, or None."""


def _masked(topology: Topology, free: int, count: int) -> int | None:
    return with_numa_mask(topology, free, count)


def _masked_by_l3(topology: Topology, free: int, count: int) -> int | None:
    return with_numa_mask(topology, free, count, take=packed_by_l3)


PEERS: Mapping[str, Allocator] = {
    "kubelet packed, Volcano": packed,
    "kubelet + uncore": packed_by_l3,
    "kubelet + TopologyManager": _masked,
    "kubelet + TM + uncore": _masked_by_l3,
    "kubelet distributed": distributed,
    "Koordinator MostAllocated": most_allocated,
    "Koordinator LeastAllocated": least_allocated,
    "Crane": crane,
    "Katalyst in TM's nodes": katalyst,
    "best fit": best_fit,
}
"""Every peer by the name that tables give it."""
