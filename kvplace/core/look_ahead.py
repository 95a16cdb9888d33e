"""What taking CPUs from a group costs the VMs that come later.

A group of CPUs (a NUMA node, an L3 group) is worth the VMs it could still hold: for every usual VM
size, the CPUs of the whole VMs that fit. A choice is charged for what it takes away from that, so that
an exact hole is preferred to a large one and a large one is not nibbled at.
"""

from __future__ import annotations

from functools import cache

SIZES = (2, 4, 8, 16, 32, 64)
"""Sizes of later VMs, in CPUs."""


def slots_lost(before: int, after: int) -> int:
    """Count the CPUs of VM slots that a group loses when `before` free CPUs become `after`."""
    return _worth(before) - _worth(after)


@cache
def _worth(free: int) -> int:
    return sum(size * (free // size) for size in SIZES)
