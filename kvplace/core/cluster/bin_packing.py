"""Filling domain after domain with the VMs that together leave the least over.

Where one VM after the other takes the best hole, the last domains end with holes of odd sizes. Looking for
the set of VMs that fills a domain exactly (the subset-sum problem, small here) leaves fewer of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from kvplace.core.cluster.draft import Draft, Shape
from kvplace.core.cluster.greedy import NARROW_FIRST, seat_all, tightest


class First(Enum):
    """Which sizes a domain is filled with first, where several sets fill it equally."""

    LARGE = "large"
    COMMON = "common"


def fill(draft: Draft, order: Sequence[int], shapes: Sequence[Shape], first: First) -> None:
    """Seat exclusive VMs domain by domain, those of narrow scopes first; then the others, one by one."""
    exclusive = [vm for vm in order if shapes[vm].request.owns_cpus]
    for scope in sorted({shapes[vm].request.options.scope for vm in exclusive}, key=NARROW_FIRST.__getitem__):
        vms = [vm for vm in exclusive if shapes[vm].request.options.scope is scope]
        waiting = _Waiting(vms, shapes)
        rooms = [
            (room.count, index, room.cpus)
            for index, node in enumerate(draft.nodes)
            for room in node.rooms(shapes[vms[0]])
        ]
        for count, index, cpus in sorted(rooms):
            for size, number in fullest(count, waiting.numbers, first):
                for _ in range(number):
                    waiting.seat_one(draft, size, index, cpus)
    seat_all(draft, [vm for vm in order if vm not in draft.seats], shapes, tightest)


class _Waiting:
    """The VMs of one scope that have no seat yet, by size, those with the most memory last."""

    def __init__(self, vms: Sequence[int], shapes: Sequence[Shape]) -> None:
        self._shapes = shapes
        self._by_size: dict[int, list[int]] = {}
        for vm in sorted(vms, key=lambda vm: shapes[vm].memory):
            self._by_size.setdefault(shapes[vm].vcpus, []).append(vm)

    @property
    def numbers(self) -> dict[int, int]:
        """How many there are of each size."""
        return {size: len(vms) for size, vms in self._by_size.items()}

    def seat_one(self, draft: Draft, size: int, index: int, cpus: int) -> None:
        """Seat the VM with the most memory of those of a size that fit into a domain."""
        vms = self._by_size[size]
        tried: set[Shape] = set()
        for position in range(len(vms) - 1, -1, -1):
            shape = self._shapes[vms[position]]
            if shape in tried:
                continue
            tried.add(shape)
            answer = draft.nodes[index].ask_within(shape, cpus)
            if answer is not None:
                draft.seat(vms.pop(position), index, answer)
                return


def fullest(room: int, numbers: Mapping[int, int], first: First = First.LARGE) -> list[tuple[int, int]]:
    """Choose how many of each size make the largest sum that a room holds.

    `numbers` says how many of each size there are. Sums are bits of an int, so this costs a few shifts.
    """
    sizes = sorted((size for size, number in numbers.items() if number and size <= room), reverse=True)
    if first is First.COMMON:
        sizes.sort(key=lambda size: -size * numbers[size])
    mask = (1 << (room + 1)) - 1
    reachable = [1]
    """The sums that the last so many of the sizes can make."""
    for size in reversed(sizes):
        sums = reachable[-1]
        most = min(numbers[size], room // size)
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
