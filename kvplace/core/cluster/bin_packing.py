"""Bin packing by minimum bin slack: scope domain after scope domain gets the VMs that leave least over.

Where VMs are assigned one by one (best fit), the last scope domains end with odd numbers of free CPUs. The
set of VMs that fills a scope domain best is a subset-sum problem, small enough here to be solved exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from kvplace.core.cluster.draft import Draft, Shape
from kvplace.core.cluster.greedy import assign_all, tightest
from kvplace.core.request import NARROW_FIRST
from kvplace.core.scalars import CpuMask


class FillOrder(Enum):
    """Which sizes go first, where several sets fill a scope domain equally."""

    LARGE = "large"
    COMMON = "common"


def pack(draft: Draft, order: Sequence[int], shapes: Sequence[Shape], first: FillOrder) -> None:
    """Assign exclusive VMs scope domain by scope domain, narrow scopes first; then the others, one by one."""
    exclusive = [vm for vm in order if shapes[vm].request.owns_cpus]
    for scope in sorted({shapes[vm].request.options.scope for vm in exclusive}, key=NARROW_FIRST.index):
        vms = [vm for vm in exclusive if shapes[vm].request.options.scope is scope]
        waiting = _Waiting(vms, shapes)
        headrooms = [
            (headroom.count, index, headroom.cpus)
            for index, node in enumerate(draft.nodes)
            for headroom in node.headrooms(shapes[vms[0]])
        ]
        for count, index, cpus in sorted(headrooms):
            draft.step()
            for size, number in best_filling(count, waiting.numbers, first):
                for _ in range(number):
                    waiting.assign_one(draft, size, index, cpus)
    assign_all(draft, order, shapes, tightest)


class _Waiting:
    """The VMs of one scope that have no node yet, by size, those with the most memory last."""

    def __init__(self, vms: Sequence[int], shapes: Sequence[Shape]) -> None:
        self._shapes = shapes
        self._by_size: dict[int, list[int]] = {}
        for vm in sorted(vms, key=lambda vm: shapes[vm].memory):
            self._by_size.setdefault(shapes[vm].vcpus, []).append(vm)

    @property
    def numbers(self) -> dict[int, int]:
        """How many there are of each size."""
        return {size: len(vms) for size, vms in self._by_size.items()}

    def assign_one(self, draft: Draft, size: int, index: int, cpus: CpuMask) -> None:
        """Assign the VM with the most memory of those of a size that fit into a scope domain."""
        vms = self._by_size[size]
        tried: set[Shape] = set()
        for position in range(len(vms) - 1, -1, -1):
            shape = self._shapes[vms[position]]
            if shape in tried:
                continue
            tried.add(shape)
            placement = draft.nodes[index].place_within(shape, cpus)
            if placement is not None:
                draft.assign(vms.pop(position), shape, index, placement)
                return


def best_filling(
    capacity: int, numbers: Mapping[int, int], first: FillOrder = FillOrder.LARGE
) -> list[tuple[int, int]]:
    """Choose how many of each size make the largest sum up to a capacity.

    `numbers` holds how many there are of each size. The sums that can be reached are bits of an int, so this
    costs a few shifts.
    """
    sizes = sorted((size for size, number in numbers.items() if number and size <= capacity), reverse=True)
    if first is FillOrder.COMMON:
        sizes.sort(key=lambda size: -size * numbers[size])
    mask = (1 << (capacity + 1)) - 1
    reachable = [1]
    """The sums of the last so many of the sizes."""
    for size in reversed(sizes):
        sums = reachable[-1]
        most = min(numbers[size], capacity // size)
        step = 1
        while most > 0:  # 1, 2, 4, ... of a size at a time
            step = min(step, most)
            sums |= (sums << (size * step)) & mask
            most -= step
            step *= 2
        reachable.append(sums)
    target = reachable[-1].bit_length() - 1
    chosen: list[tuple[int, int]] = []
    for position, size in enumerate(sizes):
        rest = reachable[len(sizes) - 1 - position]
        number = min(numbers[size], target // size)
        while not rest >> (target - number * size) & 1:
            number -= 1
        if number:
            chosen.append((size, number))
            target -= number * size
    return chosen
