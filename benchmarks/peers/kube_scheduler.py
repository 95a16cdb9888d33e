"""How kube-scheduler 1.36 chooses a node by its CPUs and memory.

The scores are those of NodeResourcesFit and NodeResourcesBalancedAllocation
(`pkg/scheduler/framework/plugins/noderesources`) with equal weights for both resources, in whole numbers as
there. All nodes are scored and of equal ones one is drawn; the real one stops searching
in clusters above 100 nodes when it has found enough that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Score = Callable[[Sequence[int], Sequence[int], Sequence[int]], int]
"""Of what is requested with the pod, what was before, and what the node can give; larger is better."""

MOST = 100


def least_allocated(requested: Sequence[int], before: Sequence[int], capacity: Sequence[int]) -> int:
    """The emptier the better; NodeResourcesFit's default."""
    del before
    parts = [
        (whole - used) * MOST // whole if used <= whole else 0
        for used, whole in zip(requested, capacity, strict=True)
        if whole
    ]
    return sum(parts) // len(parts) if parts else 0


def most_allocated(requested: Sequence[int], before: Sequence[int], capacity: Sequence[int]) -> int:
    """The fuller the better."""
    del before
    parts = [
        min(used, whole) * MOST // whole for used, whole in zip(requested, capacity, strict=True) if whole
    ]
    return sum(parts) // len(parts) if parts else 0


def balanced_allocation(requested: Sequence[int], before: Sequence[int], capacity: Sequence[int]) -> int:
    """The more the pod brings the used shares of the resources together the better."""
    gained = _balance(requested, capacity) - _balance(before, capacity)
    return MOST // 2 + int((MOST // 2 + gained) / 2)


def default_profile(requested: Sequence[int], before: Sequence[int], capacity: Sequence[int]) -> int:
    """Both plugins that check CPUs and memory when nothing is configured, with their equal weights."""
    return least_allocated(requested, before, capacity) + balanced_allocation(requested, before, capacity)


def _balance(used: Sequence[int], capacity: Sequence[int]) -> int:
    shares = [min(1.0, part / whole) for part, whole in zip(used, capacity, strict=True) if whole]
    deviation = abs(shares[0] - shares[1]) / 2 if len(shares) == 2 else 0.0
    return int((1 - deviation) * MOST)
