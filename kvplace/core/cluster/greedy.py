"""Greedy assignment: VMs one after the other, in an order, each to the node that a rule chooses.

The most difficult VMs go first, while they still fit, and small ones fill what is left. How difficult a VM is
can be measured in more than one way, and no way is the best for every mix; a plan tries several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvplace.core.cluster.draft import Draft, DraftNode, Shape
from kvplace.core.cluster.node_choice import Candidate, Fit, Strategy, best_candidate
from kvplace.core.placement import Placement
from kvplace.core.request import NARROW_FIRST

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
