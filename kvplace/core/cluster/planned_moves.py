"""Room for VMs that a plan could not seat, made by moving running VMs inside their machines.

The moves of all nodes together are one list in an order that can be carried out, before any planned VM
starts. Planned VMs may change their seats too, which costs nothing: they do not run yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvplace.core.cluster.draft import Draft, NodeState, Shape
from kvplace.core.moves.make_room import Move, MovePlan, make_room
from kvplace.core.occupant import Occupant

_MOST_NODES = 16
"""How many nodes are asked to make room for one VM, the emptiest first."""
_PLANNED = "\0"
"""How the ids of planned VMs begin here; no id that was read does."""


@dataclass(frozen=True, slots=True)
class NodeMove:
    """A move of a running VM on a node."""

    node: str
    move: Move


def move_running(draft: Draft, shapes: Sequence[Shape]) -> tuple[NodeMove, ...]:
    """Seat VMs that have no seat where the fewest and cheapest moves of running VMs make room for them."""
    moves: list[NodeMove] = []
    failed: set[Shape] = set()
    for vm in sorted(draft.waiting(len(shapes)), key=lambda vm: (shapes[vm].vcpus, vm)):
        shape = shapes[vm]
        if shape in failed:
            continue
        rooms = _rooms(draft, shape, shapes)
        if not rooms:
            failed.add(shape)
            continue
        *_, index, room = min(rooms, key=lambda one: one[:-1])
        node = draft.nodes[index]
        moves += [NodeMove(node.node.name, move) for move in room.moves if not _is_planned(move)]
        draft.nodes[index] = _after(node, room).with_seat(vm, room.placement)
        draft.seats[vm] = index
        failed.clear()
    return tuple(moves)


def _rooms(draft: Draft, shape: Shape, shapes: Sequence[Shape]) -> list[tuple[int, int, int, int, MovePlan]]:
    """(moves of running VMs, bytes moved by them, free CPUs, node, how) of the nodes that can make room."""
    able = sorted(
        (-node.free.cpus.bit_count(), index)
        for index, node in enumerate(draft.nodes)
        if node.free.cpus.bit_count() >= shape.vcpus or not shape.request.owns_cpus
    )
    found: list[tuple[int, int, int, int, MovePlan]] = []
    for negative, index in able[:_MOST_NODES]:
        node = draft.nodes[index]
        planned = [
            Occupant(f"{_PLANNED}{vm}", shapes[vm].request, placement)
            for vm, placement in node.seated.items()
        ]
        room = make_room(node.node.topology, [*node.running, *planned], shape.request, only=node.node.only)
        if isinstance(room, MovePlan):
            moves = [move for move in room.moves if not _is_planned(move)]
            found.append((len(moves), sum(move.bytes_moved for move in moves), -negative, index, room))
    return found


def _after(node: NodeState, room: MovePlan) -> NodeState:
    """The node once the moves are made."""
    to = {move.id: move.after for move in room.moves}
    running = tuple(replace(vm, placement=to.get(vm.id, vm.placement)) for vm in node.running)
    seated = {vm: to.get(f"{_PLANNED}{vm}", placement) for vm, placement in node.seated.items()}
    return node.rearranged(running, seated)


def _is_planned(move: Move) -> bool:
    return move.id.startswith(_PLANNED)
