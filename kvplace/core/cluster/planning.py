"""Planning many VMs at once: which node each one goes to, and which fit nowhere.

VMs come to a cluster one after the other; knowing all of them allows better. A plan tries several greedy
orders and bin packing, improves the best of them by local search, and keeps the best. It never places fewer
VMs than one after the other does, nor as many with fewer vCPUs. On a node the same `place` decides as
everywhere. Equal input gives equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.bin_packing import FillOrder, pack
from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.cluster.draft import Draft, Shape, shapes_of
from kvplace.core.cluster.greedy import (
    NARROW_FIRST,
    as_many_as_can_fit,
    assign_all,
    by_strategy,
    hardest_first,
    tightest,
)
from kvplace.core.cluster.local_search import exchange
from kvplace.core.cluster.node_choice import Strategy, quality
from kvplace.core.cluster.planned_moves import NodeMove, PlannedMoves, make_room_for_waiting
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request import Request
from kvplace.core.scalars import CpuMask, NodeName

Hint: TypeAlias = Sequence[tuple[int, int, CpuMask]]
"""(number of a VM, index of a node, CPUs there): an assignment from another search, to start from."""


@dataclass(frozen=True, slots=True)
class VmRequest:
    """A VM that is to be planned, with an id of its own."""

    id: str
    request: Request


@dataclass(frozen=True, slots=True)
class PlannedVm:
    """The node and the placement of a VM."""

    id: str
    node: NodeName
    placement: Placement


@dataclass(frozen=True, slots=True)
class RefusedVm:
    """A VM that fits nowhere, with the refusal of each node after the plan."""

    id: str
    request: Request
    refusals: Mapping[NodeName, Refusal]


@dataclass(frozen=True, slots=True, order=True)
class Tally:
    """How much is placed; more VMs are more, whatever their size."""

    vms: int
    vcpus: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer for every VM, in the order of the requests."""

    planned: tuple[PlannedVm, ...]
    refused: tuple[RefusedVm, ...]
    moves: tuple[NodeMove, ...]
    """Moves of running VMs that are made first, in this order."""
    placed: Tally
    one_by_one: Tally
    """What would be placed one after the other in the order given, each where Filter sends it."""
    moves_complete: bool = True
    """False when the search for moves of running VMs stopped at a bound: more VMs might fit."""


def plan(
    nodes: Sequence[ClusterNode],
    vms: Sequence[VmRequest],
    strategy: Strategy = Strategy.PACK,
    *,
    make_room: bool = False,
    hint: Hint = (),
) -> Plan:
    """Place as many VMs as possible, then as many vCPUs, then with the best locality.

    With `make_room` running VMs may move inside their machines for VMs that fit nowhere otherwise. While
    everything fits, VMs go to nodes by the strategy, as they do in a cluster.
    """
    shapes = shapes_of(vm.request for vm in vms)
    found = list(_attempts(Draft.empty(nodes), shapes, strategy, hint))
    one_by_one = tally(found[0], shapes)
    best = max(found, key=lambda draft: _rank(draft, shapes))
    if len(best.node_of) < len(shapes):
        widest = max(found, key=lambda draft: (tally(draft, shapes).vcpus, len(draft.node_of)))
        suggested = found[-1:] if hint else []
        repaired = [draft.copy() for draft in (best, widest, *suggested)]
        for draft in repaired:
            exchange(draft, shapes)
        best = max([best, *repaired], key=lambda draft: _rank(draft, shapes))
    moves = PlannedMoves()
    if make_room and len(best.node_of) < len(shapes):
        best = best.copy()
        moves = make_room_for_waiting(best, shapes)
    return _plan(best, vms, shapes, moves, one_by_one)


def tally(draft: Draft, shapes: Sequence[Shape]) -> Tally:
    """Count the assigned VMs."""
    return Tally(len(draft.node_of), sum(shapes[vm].vcpus for vm in draft.node_of))


def _attempts(empty: Draft, shapes: Sequence[Shape], strategy: Strategy, hint: Hint) -> Iterator[Draft]:
    """Assign the VMs in several ways, the first one by one as they arrive.

    Ends after the first group in which one way assigns them all: later groups assign more, not better.
    """
    arrival = range(len(shapes))
    hardest = hardest_first(empty, shapes)
    ways: list[list[Callable[[Draft], None]]] = [
        [
            lambda draft: assign_all(draft, arrival, shapes, by_strategy(strategy)),
            lambda draft: assign_all(draft, hardest, shapes, by_strategy(strategy)),
        ],
        [lambda draft: assign_all(draft, hardest, shapes, tightest)],
        [
            lambda draft: pack(draft, hardest, shapes, FillOrder.LARGE),
            lambda draft: pack(draft, hardest, shapes, FillOrder.COMMON),
        ],
    ]
    many = as_many_as_can_fit(empty, shapes)
    if many != hardest:
        ways.append(
            [
                lambda draft: assign_all(draft, many, shapes, tightest),
                lambda draft: pack(draft, many, shapes, FillOrder.LARGE),
                lambda draft: pack(draft, many, shapes, FillOrder.COMMON),
            ]
        )
    if hint:
        ways.append([lambda draft: _follow(draft, hint, hardest, shapes)])
    for group in ways:
        all_assigned = False
        for way in group:
            draft = empty.copy()
            way(draft)
            all_assigned = all_assigned or len(draft.node_of) == len(shapes)
            yield draft
        if all_assigned:
            return


def _follow(draft: Draft, hint: Hint, order: Sequence[int], shapes: Sequence[Shape]) -> None:
    """Assign the VMs of a hint as it says, narrow scopes first, then the others."""
    for vm, node, cpus in sorted(
        hint,
        key=lambda one: (NARROW_FIRST[shapes[one[0]].request.options.scope], -shapes[one[0]].vcpus, one),
    ):
        placement = draft.nodes[node].place_within(shapes[vm], cpus)
        if placement is not None:
            draft.assign(vm, node, placement)
    assign_all(draft, order, shapes, tightest)


def _rank(draft: Draft, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Rank a draft: VMs, vCPUs, then their locality; larger is better."""
    counted = tally(draft, shapes)
    locality = [0, 0, 0, 0]
    for node in draft.nodes:
        for placement in node.planned.values():
            for part, amount in enumerate(quality(node.node.topology, placement)):
                locality[part] -= amount
    return (counted.vms, counted.vcpus, *locality)


def _plan(
    draft: Draft,
    vms: Sequence[VmRequest],
    shapes: Sequence[Shape],
    moves: PlannedMoves,
    one_by_one: Tally,
) -> Plan:
    refusals: dict[Shape, Mapping[NodeName, Refusal]] = {}
    planned: list[PlannedVm] = []
    refused: list[RefusedVm] = []
    for number, (vm, shape) in enumerate(zip(vms, shapes, strict=True)):
        if number in draft.node_of:
            name = draft.nodes[draft.node_of[number]].node.name
            planned.append(PlannedVm(vm.id, name, draft.placement_of(number)))
            continue
        if shape not in refusals:
            answers = {
                node.node.name: place(node.node.topology, node.free, shape.request) for node in draft.nodes
            }
            refusals[shape] = {
                name: answer for name, answer in answers.items() if isinstance(answer, Refusal)
            }
        refused.append(RefusedVm(vm.id, vm.request, refusals[shape]))
    return Plan(
        tuple(planned),
        tuple(refused),
        moves.moves,
        tally(draft, shapes),
        one_by_one,
        moves.complete or not refused,
    )
