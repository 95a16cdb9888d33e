"""Heuristics that assign VMs to nodes: greedy orders, bin packing and local search.

Greedy: the most difficult VMs go first, while they still fit, and small ones fill the rest. The difficulty of
a VM can be measured in several ways, and none is the best for every mix; a plan tries several.

Bin packing by minimum bin slack: one scope domain after the other gets the VMs that leave the fewest CPUs
free. Where VMs are assigned one by one (best fit), the last scope domains end with odd numbers of free CPUs.
The set of VMs that fills a scope domain best is a subset-sum problem, small enough here to be solved exactly.

Local search for VMs that have no node yet: an assigned VM gives up its node where more fits without it. It
ends after a bounded number of trials, which are counted and not timed, so that equal input gives equal plans
on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from kvplace.core.cluster.draft import Draft, DraftNode, Shape
from kvplace.core.cluster.node_choice import Candidate, Fit, Strategy, best_candidate
from kvplace.core.placement import Placement
from kvplace.core.request import NARROW_FIRST
from kvplace.core.scalars import CpuMask

Choice: TypeAlias = tuple[int, Placement]
"""A node's index and a placement there."""
Chooser: TypeAlias = Callable[[Draft, Shape], Choice | None]


def assign_all(draft: Draft, order: Iterable[int], shapes: Sequence[Shape], choose: Chooser) -> None:
    """Assign VMs that have no node, in an order; VMs that fit nowhere stay without one."""
    for vm in order:
        draft.step()
        choice = choose(draft, shapes[vm]) if vm not in draft.node_of else None
        if choice is not None:
            draft.assign(vm, shapes[vm], *choice)


def by_strategy(strategy: Strategy) -> Chooser:
    """Choose the node that Filter would answer with."""
    known: dict[tuple[DraftNode, Shape], Candidate | None] = {}

    def candidate(node: DraftNode, shape: Shape) -> Candidate | None:
        if (node, shape) not in known:
            placement = node.place(shape)
            known[node, shape] = (
                Candidate(node.node.name, Fit.of(node.node.topology, node.free, shape.request, placement))
                if placement is not None
                else None
            )
        return known[node, shape]

    def choose(draft: Draft, shape: Shape) -> Choice | None:
        found = {
            one.node: (index, one)
            for index, node in enumerate(draft.nodes)
            if node.fitting(shape) and (one := candidate(node, shape)) is not None
        }
        best = best_candidate((one for _, one in found.values()), strategy)
        return None if best is None else (found[best.node][0], best.placement)

    return choose


def tightest(draft: Draft, shape: Shape) -> Choice | None:
    """Choose the scope domain with the fewest CPUs left over (best fit)."""
    ordered = sorted(
        (headroom.count, index, headroom.cpus)
        for index, node in enumerate(draft.nodes)
        for headroom in node.fitting(shape)
    )
    for _, index, cpus in ordered:
        placement = draft.nodes[index].place_within(shape, cpus)
        if placement is not None:
            return index, placement
    return None


def difficulty(draft: Draft, shapes: Iterable[Shape]) -> dict[Shape, tuple[float, float]]:
    """Measure VMs by their largest and summed share of the resources of the largest scope domain."""
    found: dict[Shape, tuple[float, float]] = {}
    largest: dict[tuple[object, ...], tuple[int, int]] = {}
    for shape in shapes:
        if shape in found:
            continue
        key = (shape.request.options.scope, shape.request.owns_cpus)
        if key not in largest:
            every = [headroom for node in draft.nodes for headroom in node.headrooms(shape)]
            largest[key] = (
                max((one.count for one in every), default=0),
                max((one.memory or 0 for one in every), default=0),
            )
        most_cpus, most_memory = largest[key]
        cpus = shape.vcpus / max(1, most_cpus)
        memory = shape.memory / most_memory if most_memory else 0.0
        found[shape] = (max(cpus, memory), cpus + memory)
    return found


def hardest_first(draft: Draft, shapes: Sequence[Shape]) -> list[int]:
    """Order by the largest share of any resource."""
    hard = difficulty(draft, shapes)
    return sorted(
        range(len(shapes)),
        key=lambda vm: (
            -hard[shapes[vm]][0],
            -hard[shapes[vm]][1],
            NARROW_FIRST.index(shapes[vm].request.options.scope),
            vm,
        ),
    )


def easiest_first(draft: Draft, shapes: Sequence[Shape]) -> list[int]:
    """Order by the largest share of any resource, the smallest first."""
    hard = difficulty(draft, shapes)
    return sorted(range(len(shapes)), key=lambda vm: (hard[shapes[vm]], vm))


def as_many_as_can_fit(draft: Draft, shapes: Sequence[Shape]) -> list[int]:
    """Order so that most VMs are assigned where not all can be.

    First the smallest ones, as many as the cluster can hold together, the most difficult of these first; then
    the rest, the smallest first.
    """
    smallest = easiest_first(draft, shapes)
    cpus = sum(node.free.cpus.bit_count() for node in draft.nodes)
    memory = sum(max(0, count) for node in draft.nodes for _, count in node.free.memory)
    counts_memory = any(node.free.memory for node in draft.nodes)
    number = 0
    for vm in smallest:
        cpus -= shapes[vm].vcpus if shapes[vm].request.owns_cpus else 0
        memory -= shapes[vm].memory
        if cpus < 0 or (counts_memory and memory < 0):
            break
        number += 1
    chosen = set(smallest[:number])
    return [vm for vm in hardest_first(draft, shapes) if vm in chosen] + smallest[number:]


def pack(draft: Draft, order: Sequence[int], shapes: Sequence[Shape]) -> None:
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
            for size, number in best_filling(count, waiting.numbers):
                for _ in range(number):
                    waiting.assign_one(draft, size, index, cpus)
    assign_all(draft, order, shapes, tightest)


class _Waiting:
    """The VMs of one scope that have no node yet, by size, in ascending order of memory."""

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
        """Assign the VM with the most memory that has this size and fits into a scope domain."""
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


def best_filling(capacity: int, numbers: Mapping[int, int]) -> list[tuple[int, int]]:
    """Choose how many of each size make the largest sum up to a capacity; of equal choices the largest sizes.

    `numbers` holds the available number of each size. The possible sums are bits of an int, so this costs a
    few shifts.
    """
    sizes = sorted((size for size, number in numbers.items() if number and size <= capacity), reverse=True)
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


_MAX_EXCHANGES = 5_000
"""Assigned VMs that one call of `exchange` tries to replace: some seconds on the largest clusters."""


def exchange(draft: Draft, shapes: Sequence[Shape]) -> None:
    """Exchange assigned VMs for several that wait, or for one with more vCPUs.

    VMs that then wait are assigned where they fit, the easiest first.
    """
    waiting = draft.waiting(len(shapes))
    for vm in sorted(draft.node_of, key=lambda vm: (-shapes[vm].vcpus, vm))[:_MAX_EXCHANGES]:
        draft.step()
        if not waiting:
            break
        for order in (
            sorted(waiting, key=lambda one: (shapes[one].vcpus, one)),
            sorted(waiting, key=lambda one: (-shapes[one].vcpus, one)),
        ):
            trial = draft.copy()
            entered = _take_over(trial, vm, order, shapes)
            if (len(entered), sum(shapes[one].vcpus for one in entered)) > (1, shapes[vm].vcpus):
                draft.become(trial)
                waiting = draft.waiting(len(shapes))
                break
    assign_all(draft, easiest_first(draft, shapes), shapes, tightest)


def _take_over(draft: Draft, vm: int, order: Sequence[int], shapes: Sequence[Shape]) -> list[int]:
    """Take a VM off its node, and assign the VMs that then fit there, in an order."""
    index = draft.node_of[vm]
    draft.unassign(vm)
    entered: list[int] = []
    refused = {shapes[vm]}
    for one in order:
        shape, node = shapes[one], draft.nodes[index]
        if shape in refused:
            continue
        placement = node.place(shape) if node.fitting(shape) else None
        if placement is not None:
            draft.assign(one, shape, index, placement)
            entered.append(one)
        else:
            refused.add(shape)
    return entered
