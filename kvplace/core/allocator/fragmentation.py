"""Fragmentation cost: what taking CPUs from a group costs the VMs that come later.

The cost of CPUs is higher in a group (a NUMA node, an L3 group) with more free CPUs, so that the fullest
group that serves is taken, as best fit does. It is higher still where a place for a large VM is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

SIZES = (2, 4, 8, 16, 32, 64)
"""Sizes of later VMs, in CPUs."""

LARGE = (32, 64)
"""Sizes of VMs that a machine keeps places for.

With all sizes, fewer VMs are forced over several NUMA nodes where VMs of all sizes come alike, but more where
nearly all are small; docs/decisions.md has what was tried.
"""

_OF_A_SLOT = 1024
"""What a CPU of a slot counts beside the preference for fuller groups, which is to decide ties."""


def slots_lost(before: int, after: int, sizes: Sequence[int] = SIZES) -> int:
    """Count the CPUs of VM slots that a group loses when `before` free CPUs become `after`."""
    return sum(size * (before // size - after // size) for size in sizes)


@cache
def fragmentation_cost(before: int, after: int) -> int:
    """Charge a group for `before` free CPUs that become `after`; never negative when these are no more.

    Charges add up: taking CPUs in two steps costs as much as in one. The unit means nothing by itself.
    """
    # Squares make the same CPUs dearer in an emptier group.
    return _OF_A_SLOT * slots_lost(before, after, LARGE) + before * before - after * after
