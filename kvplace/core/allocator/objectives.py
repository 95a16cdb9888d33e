"""The objectives of a placement in their order: each place decides only where all before it are equal.

The last one is fragmentation, the cost for later VMs when CPUs are taken from a group. The cost of CPUs is
higher in a group (a NUMA node, an L3 group) with more free CPUs, so that the fullest possible group is taken,
as in best fit. It is higher still where a place for a large VM is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class NodeRank(NamedTuple):
    """The objectives that the NUMA nodes of a VM decide; smaller is better."""

    sockets: int
    numa_nodes: int
    far_devices: int
    """NUMA nodes with devices of the VM where it has no CPU."""
    largest_distance: int
    summed_distance: int
    """Of all pairs of its NUMA nodes."""

    @property
    def size(self) -> tuple[int, int]:
        """The objectives before the devices."""
        return self.sockets, self.numa_nodes

    @property
    def distances(self) -> tuple[int, int]:
        """The objectives after the devices."""
        return self.largest_distance, self.summed_distance


class CoreRank(NamedTuple):
    """The objectives that the cores decide in NUMA nodes of equal rank; smaller is better."""

    l3_groups: int
    kinds: int
    """Kinds of cores, summed over the shares where the scope spreads."""
    cores: int
    uses: int
    """How often other VMs use the CPUs that a sharing VM names."""
    fragmentation: int
    """The cost for later VMs; the only objective that a simple rule decides."""

    @property
    def extent(self) -> tuple[int, int, int]:
        """The objectives that count what the VM takes; those after them compare equal extents."""
        return self.l3_groups, self.kinds, self.cores


LEAST_CORES = CoreRank(0, 0, 0, 0, 0)
"""The rank of no cores, and a bound for every choice."""


def summed(ranks: Iterable[CoreRank]) -> CoreRank:
    """Add up the ranks of choices that serve a VM together."""
    return CoreRank._make(map(sum, zip(*ranks, strict=True)))


SIZES = (2, 4, 8, 16, 32, 64)
"""Sizes of later VMs, in CPUs."""

LARGE = (32, 64)
"""Sizes of VMs that a machine keeps places for.

With all sizes, fewer VMs are forced over several NUMA nodes where VMs of all sizes come alike, but more where
nearly all are small; docs/decisions.md has the rules that were tried.
"""

_OF_A_SLOT = 1024
"""The weight of a CPU in a slot. The preference for fuller groups only decides ties."""


def slots_lost(before: int, after: int, sizes: Sequence[int] = SIZES) -> int:
    """Count the CPUs of VM slots that a group loses when `before` free CPUs become `after`."""
    return sum(size * (before // size - after // size) for size in sizes)


def fragmentation_cost(before: int, after: int) -> int:
    """Charge a group for `before` free CPUs that become `after`; never negative unless there are more.

    Charges add up: taking CPUs in two steps costs as much as in one. The unit means nothing by itself.
    """
    # Squares make the same CPUs dearer in an emptier group.
    return _OF_A_SLOT * slots_lost(before, after, LARGE) + before * before - after * after
