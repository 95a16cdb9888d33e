"""Making room: the moves of running VMs inside a machine so that a new one fits well.

No placement rule avoids fragmentation for long; moving one or two VMs removes it. The answer has the fewest
moves, among these the fewest bytes that go to other NUMA nodes, among these the best locality of the new VM.
Equal input gets equal answers.

The search is a depth-first branch and bound, guided by shortages. A VM has to move only because something
does not fit into a target: first the new VM, then each VM that has moved. So the search gives every such VM a
target, searches by counts for a resource that is short, and moves one more VM that would give back enough of
it, until nothing is short. Only then are the moves tried with real CPUs. A VM that is not in the way never
moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.moves.step_trials import StepTrials, Trial, moved_bytes
from kvplace.core.moves.targets import ResourceCounts, Step, Target, VmToPlace, moving_vm, new_vm
from kvplace.core.occupant import ClusterNode, RunningVms, bytes_moved, locality_of
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted
from kvplace.core.request import Policy, Request
from kvplace.core.scalars import Bytes, CpuMask
from kvplace.core.search_budget import LOOK, MAX_STEPS, Watch, WatchedBudget, unwatched

MAX_MOVES = 2
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
    """The placement of the new VM after the moves, which are made in their order."""

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
    """The reason why no moves were found."""

    sentence: str
    exact: bool
    """Whether no moves exist; False when the search stopped at its bound."""
    steps: int = field(default=0, compare=False)
    """Steps that the search took."""
    interrupted: bool = False
    """Whether the search was ended by its watch."""


def make_room(
    node: ClusterNode,
    request: Request,
    *,
    most_moves: int = MAX_MOVES,
    max_steps: int = MAX_STEPS,
    watch: Watch = unwatched,
) -> MovePlan | NoMoves:
    """Find the moves that make a VM fit well: on no more NUMA nodes than on the empty machine.

    The plan has no moves when it fits well already. VMs with policy `immovable` stay, and VMs
    with devices of the host stay on their NUMA nodes. Every VM that moves keeps its own scope and options,
    and never gets a worse locality than it has.

    For each number of moves the search takes at most `max_steps` steps (see `search_budget`). `watch` is
    called repeatedly and may end the search earlier. The answer is then the best sequence so far.
    """
    topology = node.topology
    empty = try_place(topology, free_of(topology, Ledger(), devices=node.free.devices), request)
    if empty is None:
        return NoMoves("the VM does not fit on the empty machine", exact=True)
    now = try_place(topology, node.free, request)
    if now is not None and len(now.numa_nodes) <= len(empty.numa_nodes):
        return MovePlan(now, ())
    most_moves = min(most_moves, MAX_MOVES, len(node.running) + 1)
    running = RunningVms(node)
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
    moves = []
    for step, after in zip(found.steps, found.placements, strict=True):
        before = running.occupants[step.vm.id].placement
        moves.append(Move(step.vm.id, before, after, bytes_moved(step.vm.request, before, after)))
    return tuple(moves)


_MAX_EQUALS = 24
"""Solutions of the least cost among which the one with the best locality of the new VM is chosen."""


class MoveSearch:
    """The search for one new VM on one machine."""

    def __init__(
        self,
        running: RunningVms,
        request: Request,
        empty: Placement,
        max_steps: int,
        watch: Watch = unwatched,
    ) -> None:
        self._running = running
        self._topology = running.topology
        self.budget = WatchedBudget(max_steps, watch)
        """Steps of the search for the present number of moves."""
        self._trials = StepTrials(running, request, len(empty.numa_nodes), self.budget)
        self._ideal = self._quality(empty)
        self._movable = {
            uid: one
            for uid, one in running.occupants.items()
            if one.movable and one.request.options.policy is not Policy.IMMOVABLE
        }
        self._counts = ResourceCounts(running, self._movable)
        self._reachable = CpuMask(running.free(dict.fromkeys(self._movable)).pool)
        self._new = new_vm(running, request, len(empty.numa_nodes), self._reachable)
        self._vms: dict[str, VmToPlace] = {}
        self._kinds = self._kinds_of_vms()
        self._best: tuple[int, tuple[int, ...], Trial] | None = None
        """(bytes moved, locality of the new VM, the moves); the smallest so far."""
        self._equals = 0
        self._seen: set[object] = set()

    def best(self, most_moves: int) -> Trial | None:
        """Find the solution with the fewest moves, of these the cheapest; exact within the budget."""
        if not self._counts.suffice_in_total(self._new):
            return None
        for count in range(1, most_moves + 1):
            self._seen.clear()
            self.budget.renew()
            for target in self._new.targets:
                self._search(target, (), count, 0)
            if self._best is not None:
                return self._best[2]
        return None

    def _search(self, target: Target, steps: tuple[Step, ...], left: int, cost: int) -> None:
        """Try all ways to make the new VM fit into its target with `left` more steps."""
        if self.budget.exceeded():
            return
        key = (target.cpus, frozenset((step.vm.id, step.target.cpus) for step in steps))
        if key in self._seen:
            return
        self._seen.add(key)
        self.budget.spend(LOOK)
        items = [(self._new, target), *((step.vm, step.target) for step in steps)]
        gone = frozenset(step.vm.id for step in steps)
        if not left:
            if next(self._counts.shortages(items, gone), None) is None:
                self._try(target, steps)
            return
        candidates: list[str] | None = None
        for short in self._counts.shortages(items, gone):
            able = short.must_move(gone, left)
            if not able:
                return
            if candidates is None or len(able) < len(candidates):
                candidates = able
        kinds: set[object] = set()
        for uid in candidates if candidates is not None else self._nearby(target, steps):
            kind = self._kinds[uid]
            if kind not in kinds:
                kinds.add(kind)
                self._move(target, steps, self._vm(uid), left - 1, cost)

    def _move(self, target: Target, steps: tuple[Step, ...], vm: VmToPlace, left: int, cost: int) -> None:
        """Let one more VM go to each of its targets."""
        gone = frozenset((vm.id, *(step.vm.id for step in steps)))
        for its_target in vm.targets:
            self.budget.spend(1)
            if not left and not self._counts.has_cpus(its_target, vm, gone):
                continue
            total = cost + its_target.moved
            if not self._may_improve(total):
                return  # the targets after it cost no less
            self._search(target, (*steps, Step(vm, its_target)), left, total)

    def _may_improve(self, cost: int) -> bool:
        if self._best is None or cost < self._best[0]:
            return True
        return cost == self._best[0] and self._best[1] > self._ideal and self._equals < _MAX_EQUALS

    def _nearby(self, target: Target, steps: Sequence[Step]) -> list[str]:
        """The VMs in all these targets: without a shortage by counts, any of them may be in the way."""
        cpus, nodes = target.cpus, target.nodes
        for step in steps:
            cpus |= step.target.cpus
            nodes |= step.target.nodes
        gone = {step.vm.id for step in steps}
        return [
            uid
            for uid, one in self._movable.items()
            if uid not in gone and (one.placement.cpus & cpus or nodes & one.placement.memory.keys())
        ]

    def _try(self, target: Target, steps: tuple[Step, ...]) -> None:
        orders = [order for order in permutations(steps) if self._counts.allow_in_order(order)]
        least = sum(step.target.moved for step in steps)
        self._try_orders(orders, target, least)

    def _try_orders(self, orders: Sequence[tuple[Step, ...]], target: Target, least: int) -> None:
        """Keep the cheapest way to take steps in one of these orders; none costs less than `least`."""
        cost: int | None = None
        for order in orders:
            if (trial := self._trials.try_steps(order, target)) is not None:
                cost = self._keep(trial)
                if cost <= least:
                    return
        for order in orders:
            while cost is None or cost > least:
                below = cost if cost is not None else self._best[0] + 1 if self._best else None
                trial = self._trials.try_all_cpus(order, below)
                if trial is None:
                    break
                cost = self._keep(trial)

    def _keep(self, trial: Trial) -> int:
        """Remember a solution if it is the best, and return its cost."""
        cost = moved_bytes(self._running, trial.steps, trial.placements)
        quality = self._quality(trial.placement)
        if self._best is not None and cost == self._best[0]:
            self._equals += 1
        if self._best is None or (cost, quality) < self._best[:2]:
            self._best = (cost, quality, trial)
        return cost

    def _quality(self, placement: Placement) -> tuple[int, ...]:
        cores = {self._topology.core_of[cpu] for cpu in cpus_of(placement.cpus)}
        return (*locality_of(self._topology, placement), len(placement.l3_groups), len(cores))

    def _vm(self, uid: str) -> VmToPlace:
        vm = self._vms.get(uid)
        if vm is None:
            vm = self._vms[uid] = moving_vm(self._running, self._movable[uid], self._reachable)
            self.budget.spend(LOOK * len(vm.targets))
        return vm

    def _kinds_of_vms(self) -> dict[str, object]:
        """Sort the movable VMs into kinds: every VM of a kind frees equally much."""
        kinds: dict[str, object] = {}
        holders: dict[int, set[str]] = {}
        usable = self._running.topology.allocatable
        for uid, one in self._running.occupants.items():
            for cpu in cpus_of(one.placement.cpus | one.placement.owned):
                holders.setdefault(self._topology.core_of[cpu], set()).add(uid)
        for uid, one in self._movable.items():
            taken = (one.placement.cpus | one.placement.owned) & usable
            cores = [core for core in self._topology.cores if core & taken]
            if any(holders[core] != {uid} for core in cores):
                kinds[uid] = uid
                continue
            kinds[uid] = (
                one.request.key,
                tuple(sorted(one.placement.memory.items())),
                one.placement.numa_nodes,
                tuple(
                    sorted(
                        (
                            self._position(core),
                            core.bit_count(),
                            (core & usable).bit_count(),
                            (core & taken).bit_count(),
                        )
                        for core in cores
                    )
                ),
            )
        return kinds

    def _position(self, core: CpuMask) -> tuple[object, ...]:
        topology = self._topology
        groups = tuple(index for index, l3 in enumerate(topology.l3_groups) if l3 & core)
        return topology.packages_of(core), topology.nodes_of(core), groups
