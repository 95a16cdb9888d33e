"""Moves of running VMs inside their machines, for VMs that a plan could not assign.

The moves of all nodes are one list; in this order they can be carried out before any planned VM
starts. Planned VMs may get other CPUs too, which costs nothing: they do not run yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvplace.core.cluster.draft import PLANNED, Draft, DraftNode, Shape, Stopped
from kvplace.core.device_locality import too_few_devices
from kvplace.core.moves.make_room import Move, MovePlan, make_room
from kvplace.core.scalars import NodeName
from kvplace.core.search_budget import MAX_STEPS

_MAX_NODES = 16
"""Nodes where moves are searched for one VM, the emptiest first."""
_MAX_TOTAL_STEPS = 20 * MAX_STEPS
"""Search steps for all VMs of a plan: minutes at worst."""


@dataclass(frozen=True, slots=True)
class NodeMove:
    """A move of a running VM on a node."""

    node: NodeName
    move: Move


@dataclass(frozen=True, slots=True)
class PlannedMoves:
    """The moves of running VMs that a plan needs."""

    moves: tuple[NodeMove, ...] = ()
    """In their order of execution."""
    complete: bool = True
    """Whether the search ended for no VM at a bound: with more search, more VMs might fit."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Moves on one node that make one VM fit there."""

    node: int
    plan: MovePlan
    free: int
    """Free CPUs of the node."""

    @property
    def cost(self) -> tuple[int, int, int, int]:
        """Moves of running VMs, bytes that they move, free CPUs, node; the smallest is the best."""
        moves = _of_running(self.plan)
        return len(moves), sum(move.bytes_moved for move in moves), self.free, self.node


def make_room_for_waiting(draft: Draft, shapes: Sequence[Shape]) -> PlannedMoves:
    """Assign VMs that wait, each where the fewest and cheapest moves of running VMs make room for it."""
    search = _Search(shapes)
    moves: list[NodeMove] = []
    failed: set[Shape] = set()
    for vm in sorted(draft.waiting(len(shapes)), key=lambda vm: (shapes[vm].vcpus, vm)):
        shape = shapes[vm]
        if shape in failed:
            continue
        try:
            found = search.on_all_nodes(draft, shape)
        except Stopped:
            return PlannedMoves(tuple(moves), complete=False)
        if not found:
            failed.add(shape)
            continue
        best = min(found, key=lambda one: one.cost)
        node = draft.nodes[best.node]
        moves += [NodeMove(node.node.name, move) for move in _of_running(best.plan)]
        draft.nodes[best.node] = _after(node, best.plan).with_vm(vm, shape, best.plan.placement)
        draft.node_of[vm] = best.node
        failed.clear()
    return PlannedMoves(tuple(moves), search.complete)


class _Search:
    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = shapes
        self._steps = _MAX_TOTAL_STEPS
        self.complete = True

    def on_all_nodes(self, draft: Draft, shape: Shape) -> list[_Found]:
        """Search the emptiest nodes for moves that make room for a VM."""
        able = sorted(
            (-node.free.cpus.bit_count(), index)
            for index, node in enumerate(draft.nodes)
            if node.node.name not in shape.closed
            and (node.free.cpus.bit_count() >= shape.vcpus or not shape.request.owns_cpus)
            and too_few_devices(node.free.devices, shape.request.devices) is None
        )
        found: list[_Found] = []
        cut = len(able) > _MAX_NODES
        for negative, index in able[:_MAX_NODES]:
            if self._steps <= 0:
                cut = True
                break
            draft.step()
            node = draft.nodes[index]
            answer = make_room(
                node.node.topology,
                [*node.running, *node.planned.values()],
                shape.request,
                devices=node.free.devices,
                max_steps=min(self._steps, MAX_STEPS),
            )
            self._steps -= answer.steps
            if isinstance(answer, MovePlan):
                found.append(_Found(index, answer, -negative))
            else:
                cut = cut or not answer.exact
        if cut and not found:
            self.complete = False
        return found


def _after(node: DraftNode, plan: MovePlan) -> DraftNode:
    """The node once the moves are made."""
    to = {move.id: move.after for move in plan.moves}
    running = tuple(replace(vm, placement=to.get(vm.id, vm.placement)) for vm in node.running)
    planned = {
        number: replace(vm, placement=to.get(vm.id, vm.placement)) for number, vm in node.planned.items()
    }
    return node.rearranged(running, planned)


def _of_running(plan: MovePlan) -> list[Move]:
    return [move for move in plan.moves if not move.id.startswith(PLANNED)]
