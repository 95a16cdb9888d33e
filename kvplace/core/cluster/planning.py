"""Many VMs at once: which goes to which node, and which find no room.

One after the other, as they arrive, is how VMs come to a cluster; knowing all of them allows better. A
plan tries several ways of seating them, lets VMs change seats for those left over, and keeps the best that
it found. It never seats fewer VMs than one after the other does, nor as many with fewer vCPUs. Inside a
node the same `place` decides as everywhere. Equal input gives equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.bin_packing import First, fill
from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.cluster.draft import Draft, Shape, shapes_of
from kvplace.core.cluster.greedy import (
    NARROW_FIRST,
    as_many_as_can_fit,
    by_strategy,
    evenest,
    hardest_first,
    narrowest_first,
    seat_all,
    tightest,
)
from kvplace.core.cluster.local_search import let_in, trade
from kvplace.core.cluster.node_choice import Strategy, quality
from kvplace.core.cluster.planned_moves import NodeMove, move_running
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request import Request

Hint: TypeAlias = Sequence[tuple[int, int, int]]
"""(number of a VM, index of a node, CPUs there) that another search has found good together."""


@dataclass(frozen=True, slots=True)
class VmRequest:
    """A VM that somebody wants, with an id that no other one has."""

    id: str
    request: Request


@dataclass(frozen=True, slots=True)
class PlannedVm:
    """Where a VM goes."""

    id: str
    node: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class RefusedVm:
    """A VM for which no room was found, and what each node says to it beside all that have room."""

    id: str
    request: Request
    refusals: Mapping[str, Refusal]


@dataclass(frozen=True, slots=True, order=True)
class Tally:
    """How much found room; more VMs are more, whatever their size."""

    vms: int
    vcpus: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of every VM, in the order in which they were wanted."""

    planned: tuple[PlannedVm, ...]
    refused: tuple[RefusedVm, ...]
    moves: tuple[NodeMove, ...]
    """What running VMs must do first, in this order."""
    placed: Tally
    one_by_one: Tally
    """What would find room one after the other in the order given, each where Filter sends it."""


def plan(
    nodes: Sequence[ClusterNode],
    wanted: Sequence[VmRequest],
    strategy: Strategy = Strategy.PACK,
    *,
    make_room: bool = False,
    hint: Hint = (),
) -> Plan:
    """Find room for as many VMs as possible, of equal plans for most vCPUs, of these the best seated.

    With `make_room` running VMs may move inside their machines for VMs that found no room otherwise. While
    everything fits, VMs go to nodes by the strategy, as they do in a cluster.
    """
    shapes = shapes_of(vm.request for vm in wanted)
    found = list(_attempts(Draft.empty(nodes), shapes, strategy, hint))
    one_by_one = tally(found[0], shapes)
    best = max(found, key=lambda draft: _worth(draft, shapes))
    if len(best.seats) < len(shapes):
        widest = max(found, key=lambda draft: (tally(draft, shapes).vcpus, len(draft.seats)))
        suggested = found[-1:] if hint else []
        repaired = [draft.copy() for draft in (best, widest, *suggested)]
        for draft in repaired:
            let_in(draft, shapes)
            trade(draft, shapes)
            let_in(draft, shapes)
        best = max([best, *repaired], key=lambda draft: _worth(draft, shapes))
    moves: tuple[NodeMove, ...] = ()
    if make_room and len(best.seats) < len(shapes):
        best = best.copy()
        moves = move_running(best, shapes)
        let_in(best, shapes)
    return _plan(best, wanted, shapes, moves, one_by_one)


def tally(draft: Draft, shapes: Sequence[Shape]) -> Tally:
    """Count what has a seat."""
    return Tally(len(draft.seats), sum(shapes[vm].vcpus for vm in draft.seats))


def _attempts(empty: Draft, shapes: Sequence[Shape], strategy: Strategy, hint: Hint) -> Iterator[Draft]:
    """PlannedVm the VMs in one way after the other, the first one after the other as they arrive.

    Ends early once all of them have seats: what follows seats more, not better.
    """
    arrival = range(len(shapes))
    hardest = hardest_first(empty, shapes)
    ways: list[list[Callable[[Draft], None]]] = [
        [
            lambda draft: seat_all(draft, arrival, shapes, by_strategy(strategy)),
            lambda draft: seat_all(draft, hardest, shapes, by_strategy(strategy)),
        ],
        [
            lambda draft: seat_all(draft, hardest, shapes, tightest),
            lambda draft: seat_all(draft, narrowest_first(shapes), shapes, tightest),
            lambda draft: seat_all(draft, hardest, shapes, evenest),
        ],
        [
            lambda draft: fill(draft, hardest, shapes, First.LARGE),
            lambda draft: fill(draft, hardest, shapes, First.COMMON),
        ],
    ]
    many = as_many_as_can_fit(empty, shapes)
    if many != hardest:
        ways.append(
            [
                lambda draft: seat_all(draft, many, shapes, tightest),
                lambda draft: seat_all(draft, many, shapes, evenest),
                lambda draft: fill(draft, many, shapes, First.LARGE),
                lambda draft: fill(draft, many, shapes, First.COMMON),
            ]
        )
    if hint:
        ways.append([lambda draft: _follow(draft, hint, hardest, shapes)])
    for group in ways:
        everybody = False
        for way in group:
            draft = empty.copy()
            way(draft)
            everybody = everybody or len(draft.seats) == len(shapes)
            yield draft
        if everybody:
            return


def _follow(draft: Draft, hint: Hint, order: Sequence[int], shapes: Sequence[Shape]) -> None:
    """PlannedVm the VMs that a hint names where it says, narrow scopes first, then the others."""
    for vm, node, cpus in sorted(
        hint,
        key=lambda one: (NARROW_FIRST[shapes[one[0]].request.options.scope], -shapes[one[0]].vcpus, one),
    ):
        answer = draft.nodes[node].ask_within(shapes[vm], cpus)
        if answer is not None:
            draft.seat(vm, node, answer)
    seat_all(draft, [vm for vm in order if vm not in draft.seats], shapes, tightest)


def _worth(draft: Draft, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """What a draft is worth: VMs, vCPUs, then how well they sit."""
    counted = tally(draft, shapes)
    sitting = [0, 0, 0, 0]
    for node in draft.nodes:
        for placement in node.seated.values():
            for part, amount in enumerate(quality(node.node.topology, placement)):
                sitting[part] -= amount
    return (counted.vms, counted.vcpus, *sitting)


def _plan(
    draft: Draft,
    wanted: Sequence[VmRequest],
    shapes: Sequence[Shape],
    moves: tuple[NodeMove, ...],
    one_by_one: Tally,
) -> Plan:
    refusals: dict[Shape, Mapping[str, Refusal]] = {}
    seats: list[PlannedVm] = []
    denied: list[RefusedVm] = []
    for number, (vm, shape) in enumerate(zip(wanted, shapes, strict=True)):
        if number in draft.seats:
            name = draft.nodes[draft.seats[number]].node.name
            seats.append(PlannedVm(vm.id, name, draft.placement_of(number)))
            continue
        if shape not in refusals:
            answers = {
                node.node.name: place(node.node.topology, node.free, shape.request) for node in draft.nodes
            }
            refusals[shape] = {
                name: answer for name, answer in answers.items() if isinstance(answer, Refusal)
            }
        denied.append(RefusedVm(vm.id, vm.request, refusals[shape]))
    return Plan(tuple(seats), tuple(denied), moves, tally(draft, shapes), one_by_one)
