"""Seating VMs one after the other: in which order, and each on which node.

The hardest to seat go first, where they still find room, and the small ones fill what is left. How hard
a VM is can be said in more than one way, and no way is the best for every mix; a plan tries several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvplace.core.cluster.draft import Draft, NodeState, Room, Shape
from kvplace.core.cluster.node_choice import Candidate, Strategy, best_candidate
from kvplace.core.placement import Placement
from kvplace.core.request import Scope

Spot: TypeAlias = tuple[int, Placement]
"""A node's index and a placement there."""
Chooser: TypeAlias = Callable[[Draft, Shape], Spot | None]

NARROW_FIRST = {
    Scope.ONE_L3: 0,
    Scope.ONE_NUMA: 1,
    Scope.ONE_SOCKET: 2,
    Scope.SPREAD_NUMA: 3,
    Scope.SPREAD_SOCKETS: 4,
    Scope.ANY: 5,
}
"""Scopes in the order in which they leave the least choice."""


def seat_all(draft: Draft, order: Iterable[int], shapes: Sequence[Shape], choose: Chooser) -> None:
    """Seat VMs in an order; those that find no room stay without a seat."""
    for vm in order:
        spot = choose(draft, shapes[vm])
        if spot is not None:
            draft.seat(vm, *spot)


def by_strategy(strategy: Strategy) -> Chooser:
    """Choose the node that Filter would answer with."""
    known: dict[tuple[NodeState, Shape], Candidate | None] = {}

    def candidate(node: NodeState, shape: Shape) -> Candidate | None:
        if (node, shape) not in known:
            answer = node.ask(shape)
            known[node, shape] = (
                Candidate(node.node.name, node.node.topology, answer, node.free, shape.vcpus)
                if answer is not None
                else None
            )
        return known[node, shape]

    def choose(draft: Draft, shape: Shape) -> Spot | None:
        found = {
            one.node: (index, one)
            for index, node in enumerate(draft.nodes)
            if node.fitting(shape) and (one := candidate(node, shape)) is not None
        }
        best = best_candidate((one for _, one in found.values()), strategy)
        return None if best is None else (found[best.node][0], best.placement)

    return choose


def tightest(draft: Draft, shape: Shape) -> Spot | None:
    """Choose the domain in which the fewest CPUs are left over."""
    return _first(draft, shape, lambda room: room.count)


def evenest(draft: Draft, shape: Shape) -> Spot | None:
    """Choose the domain whose CPUs and memory come nearest to being used up together."""

    def left(room: Room) -> float:
        cpus = (room.count - shape.vcpus) / max(1, room.cpus.bit_count())
        memory = ((room.memory or 0) - shape.memory) / room.all_memory if room.all_memory else 0.0
        return cpus * cpus + memory * memory

    return _first(draft, shape, left)


def hardness(draft: Draft, shapes: Iterable[Shape]) -> dict[Shape, tuple[float, float]]:
    """Say how hard VMs are to seat: the largest and the summed share of the largest domain they may have."""
    found: dict[Shape, tuple[float, float]] = {}
    largest: dict[tuple[object, ...], tuple[int, int]] = {}
    for shape in shapes:
        if shape in found:
            continue
        key = (shape.request.options.scope, shape.request.owns_cpus)
        if key not in largest:
            rooms = [room for node in draft.nodes for room in node.rooms(shape)]
            largest[key] = (max(room.count for room in rooms), max(room.memory or 0 for room in rooms))
        most_cpus, most_memory = largest[key]
        cpus = shape.vcpus / max(1, most_cpus)
        memory = shape.memory / most_memory if most_memory else 0.0
        found[shape] = (max(cpus, memory), cpus + memory)
    return found


def hardest_first(draft: Draft, shapes: Sequence[Shape]) -> list[int]:
    """Order by the largest share of any resource."""
    hard = hardness(draft, shapes)
    return sorted(
        range(len(shapes)),
        key=lambda vm: (
            -hard[shapes[vm]][0],
            -hard[shapes[vm]][1],
            NARROW_FIRST[shapes[vm].request.options.scope],
            vm,
        ),
    )


def narrowest_first(shapes: Sequence[Shape]) -> list[int]:
    """Order by scope, then by size."""
    return sorted(
        range(len(shapes)),
        key=lambda vm: (
            NARROW_FIRST[shapes[vm].request.options.scope],
            -shapes[vm].vcpus,
            -shapes[vm].memory,
            vm,
        ),
    )


def as_many_as_can_fit(draft: Draft, shapes: Sequence[Shape]) -> list[int]:
    """Order so that most VMs are seated where not all can be.

    Of the smallest ones as many as the cluster has room for, the hardest of these first; then the rest,
    the smallest first.
    """
    hard = hardness(draft, shapes)
    smallest = sorted(range(len(shapes)), key=lambda vm: (hard[shapes[vm]], vm))
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


def _first(draft: Draft, shape: Shape, left: Callable[[Room], float]) -> Spot | None:
    """Ask for the domains in the order of what would be left in them; the first that holds the VM."""
    ordered = sorted(
        (left(room), index, room.cpus)
        for index, node in enumerate(draft.nodes)
        for room in node.fitting(shape)
    )
    for _, index, cpus in ordered:
        answer = draft.nodes[index].ask_within(shape, cpus)
        if answer is not None:
            return index, answer
    return None
