"""What taking CPUs from a group costs the VMs that come later.

A group of CPUs (a NUMA node, an L3 group) is worth the VMs it could still hold: for every usual VM size,
the CPUs of the whole VMs that fit. A choice is charged for what it takes away from that, so that an exact
hole is preferred to a large one, and a group that has room for a large VM is not nibbled at while a broken
one will do. Of groups that lose as much the fuller one is taken, as best fit does.
"""

from __future__ import annotations

from functools import cache

SIZES = (2, 4, 8, 16, 32, 64)
"""Sizes of later VMs, in CPUs."""

_OF_A_SLOT = 1024
"""What a CPU of a slot counts beside the preference for fuller groups, which is to decide ties."""


def slots_lost(before: int, after: int) -> int:
    """Charge a group for `before` free CPUs that become `after`; never negative when these are no more.

    Charges add up: taking CPUs in two steps costs as much as in one. The unit means nothing by itself.
    """
    return _worth(before) - _worth(after)


@cache
def _worth(free: int) -> int:
    slots = sum(size * (free // size) for size in SIZES)
    # The square makes the same CPUs dearer in an emptier group.
    return _OF_A_SLOT * slots + free * free
