"""Whether a running VM gets better cores when its request is placed again on its own machine.

`serve` decides by this rule when it is asked to place a VM again, and `defragment` predicts the answer with
it. So a move never makes the VM worse, and the machine keeps at least as many places for later VMs, unless
the VM itself comes to sit better.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvplace.core.allocator.allocate import try_place
from kvplace.core.free_resources import Free
from kvplace.core.occupant import locality_of
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import Topology

SIZES = (4, 8, 16, 32, 64)
"""Sizes of the VMs that places are counted for, in CPUs."""


def better_placement(topology: Topology, free: Free, request: Request, before: Placement) -> Placement | None:
    """Place a running VM again; None where it gets nothing better.

    `free` is what the machine has without the VM.
    """
    after = try_place(topology, free, request)
    return after if after is not None and is_better(topology, free, before, after) else None


def is_better(topology: Topology, free: Free, before: Placement, after: Placement) -> bool:
    """Whether a VM sits better, or leaves more places for others and sits as well.

    Sockets, NUMA nodes, distances, L3 groups and cores count in this order, then the CPUs of the places.
    """
    return _standing(topology, free, after) < _standing(topology, free, before)


def cpus_in_places(topology: Topology, free: CpuMask) -> int:
    """Count the CPUs of all VMs of one size that fit on single NUMA nodes, summed over the sizes."""
    return sum(size * places(topology, free, size) for size in SIZES)


def places(topology: Topology, free: CpuMask, size: int) -> int:
    """Count the VMs of one size that fit, each on a single NUMA node, by the free CPUs alone."""
    return sum((node.cpus & free).bit_count() // size for node in topology.numa_nodes)


def left_by(free: Free, placement: Placement) -> CpuMask:
    """Return the CPUs that stay free for an exclusive VM beside a placement."""
    return CpuMask(free.cpus & ~(placement.cpus | placement.owned))


def _standing(topology: Topology, free: Free, placement: Placement) -> tuple[int, ...]:
    """The smaller the better."""
    return (
        *locality_of(topology, placement),
        _touched(topology.l3_groups, placement.cpus),
        _touched(topology.cores, placement.cpus),
        -cpus_in_places(topology, left_by(free, placement)),
    )


def _touched(groups: Iterable[CpuMask], cpus: CpuMask) -> int:
    return sum(1 for group in groups if group & cpus)
