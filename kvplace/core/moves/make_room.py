"""Making room: which running VMs to move inside a machine so that a new one fits well.

No rule of placing avoids fragmentation for long; moving one or two VMs does. The answer is the fewest
moves, of these the ones that take the least memory to other NUMA nodes, of these the ones after which the
new VM sits best; equal inputs get equal answers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvplace.core.allocator.allocate import try_place
from kvplace.core.free import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.moves.move_search import Found, RoomSearch
from kvplace.core.occupant import Occupant, RunningVms, bytes_moved
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.topology import Topology

__all__ = ["MOST_MOVES", "Move", "Occupant", "Room", "make_room"]

MOST_MOVES = 3
"""More moves than that are not searched for."""


@dataclass(frozen=True, slots=True)
class Move:
    """One step: a running VM leaves its place for another that nobody else has at that moment."""

    id: str
    before: Placement
    after: Placement
    bytes_moved: int
    """Memory that has to go to another NUMA node."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where the new VM fits once the moves are made, in their order."""

    placement: Placement
    moves: tuple[Move, ...]

    @property
    def bytes_moved(self) -> int:
        """Memory that all moves together take to other NUMA nodes."""
        return sum(move.bytes_moved for move in self.moves)


def make_room(
    topology: Topology,
    occupants: Sequence[Occupant],
    request: Request,
    *,
    only: int | None = None,
    most_moves: int = MOST_MOVES,
    fixed: Collection[str] = (),
    thorough: bool = False,
) -> Room | None:
    """Find the moves after which a VM fits well: in its scope, over no more NUMA nodes than if all were free.

    None when there are none such; no moves when it fits well as things are. VMs with policy `immovable`
    and those in `fixed` (by id) stay. Every VM that moves keeps its own constraints and is strewn over no
    more sockets and NUMA nodes, and no farther, than before. `only` restricts the CPUs as in `free_of`.

    One and two moves are searched without bound, and so is everything on machines of up to 16 CPUs. On
    larger ones three moves are looked for as long as a bound on the effort allows, and so are choices of
    CPUs that differ in their cores alone; a `thorough` search knows no bound, and where no moves help on a
    large machine it may take minutes.
    """
    empty = try_place(topology, free_of(topology, Ledger(), only=only), request)
    if empty is None:
        return None
    running_vms = RunningVms(topology, occupants, only)
    now = try_place(topology, running_vms.free({}), request)
    if now is not None and len(now.numa_nodes) <= len(empty.numa_nodes):
        return Room(now, ())
    most_moves = min(most_moves, MOST_MOVES, len(occupants) + 1)
    found = RoomSearch(running_vms, request, empty, frozenset(fixed), thorough=thorough).best(most_moves)
    return None if found is None else Room(found.seated.placement, _moves(running_vms, found))


def _moves(running_vms: RunningVms, found: Found) -> tuple[Move, ...]:
    now: dict[str, Placement] = {}
    moves = []
    for step, after in zip(found.steps, found.seated.places, strict=True):
        uid = step.wish.id
        before = now.get(uid) or running_vms.occupants[uid].placement
        moves.append(Move(uid, before, after, bytes_moved(step.wish.request, before, after)))
        now[uid] = after
    return tuple(moves)
