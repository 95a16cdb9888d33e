"""Making room: which running VMs to move inside a machine so that a new one fits well.

No placement rule avoids fragmentation for long; moving one or two VMs removes it. The answer has the fewest
moves, among these the fewest bytes that go to other NUMA nodes, among these the best locality of the new VM.
Equal input gets equal answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvplace.core.allocator.allocate import try_place
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.moves.move_search import MoveSearch
from kvplace.core.moves.step_trials import Trial
from kvplace.core.node_devices import NodeDevices
from kvplace.core.occupant import Occupant, RunningVms, bytes_moved
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted
from kvplace.core.request import Request
from kvplace.core.scalars import Bytes, CpuMask
from kvplace.core.search_budget import MAX_STEPS, Watch, unwatched
from kvplace.core.topology import Topology

MAX_MOVES = 3
"""More moves than that are not searched for."""


@dataclass(frozen=True, slots=True)
class Move:
    """One step: a running VM goes to CPUs that no other VM has at that moment."""

    id: str
    before: Placement
    after: Placement
    bytes_moved: Bytes
    """Memory that has to go to another NUMA node."""


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Where the new VM fits after the moves, which are made in their order."""

    placement: Placement
    moves: tuple[Move, ...]
    steps: int = field(default=0, compare=False)
    """Steps that the search took."""
    interrupted: bool = False
    """Whether the search was ended by its watch: a longer one may find cheaper moves."""

    @property
    def bytes_moved(self) -> Bytes:
        """Memory that has to go to other NUMA nodes in all moves."""
        return Bytes(sum(move.bytes_moved for move in self.moves))


@dataclass(frozen=True, slots=True)
class NoMoves:
    """No moves were found, and why."""

    sentence: str
    exact: bool
    """Whether there are none; False when the search stopped at its bound."""
    steps: int = field(default=0, compare=False)
    """Steps that the search took."""
    interrupted: bool = False
    """Whether the search was ended by its watch."""


def make_room(
    topology: Topology,
    occupants: Sequence[Occupant],
    request: Request,
    *,
    only: CpuMask | None = None,
    devices: NodeDevices | None = None,
    most_moves: int = MAX_MOVES,
    max_steps: int = MAX_STEPS,
    watch: Watch = unwatched,
) -> MovePlan | NoMoves:
    """Find the moves that make a VM fit well: on no more NUMA nodes than on the empty machine.

    The plan has no moves when it fits well already. VMs with policy `immovable` stay, and VMs
    with devices of the host stay on their NUMA nodes. Every VM that moves keeps its own scope and options,
    and never gets a worse locality than it has. `only` restricts the CPUs as in `free_of`, and
    `devices` are the free ones.

    For each number of moves the search takes at most `max_steps` steps (see `search_budget`); the best
    moves found until then are the answer. So they are when `watch`, asked again and again, ends the search.
    """
    empty = try_place(topology, free_of(topology, Ledger(), only=only, devices=devices), request)
    if empty is None:
        return NoMoves("the VM does not fit on the empty machine", exact=True)
    running = RunningVms(topology, occupants, only, devices)
    now = try_place(topology, running.free({}), request)
    if now is not None and len(now.numa_nodes) <= len(empty.numa_nodes):
        return MovePlan(now, ())
    most_moves = min(most_moves, MAX_MOVES, len(occupants) + 1)
    search = MoveSearch(running, request, empty, max_steps, watch)
    found = search.best(most_moves)
    steps = search.budget.total
    if found is not None:
        return MovePlan(found.placement, _moves(running, found), steps, search.budget.was_stopped)
    if search.budget.was_stopped:
        sentence = "no moves found before the search was interrupted; there may be some"
        return NoMoves(sentence, exact=False, steps=steps, interrupted=True)
    if search.budget.was_exceeded:
        sentence = f"no moves found within {max_steps:,} search steps; there may be some"
        return NoMoves(sentence, exact=False, steps=steps)
    sentence = f"no sequence of up to {counted(most_moves, 'move')} makes room"
    return NoMoves(sentence, exact=True, steps=steps)


def _moves(running: RunningVms, found: Trial) -> tuple[Move, ...]:
    now: dict[str, Placement] = {}
    moves = []
    for step, after in zip(found.steps, found.placements, strict=True):
        uid = step.vm.id
        before = now.get(uid) or running.occupants[uid].placement
        moves.append(Move(uid, before, after, bytes_moved(step.vm.request, before, after)))
        now[uid] = after
    return tuple(moves)
