"""The search for the fewest and cheapest moves, guided by what is short where.

A VM has to move only because something that must fit into a region does not: first the new VM, then each
VM that made way. So the search gives every such VM a region, looks by counts for one that is overfull,
and lets one more VM of that region go, until nothing is short; then it tries the moves in earnest. A VM
that nobody needs gone never moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from kvplace.core.cpuset import cpus_of
from kvplace.core.moves.shortages import Counts
from kvplace.core.moves.step_trials import Seated, Step, Steps, cost_of
from kvplace.core.moves.targets import Region, Wish, mover, newcomer
from kvplace.core.occupant import RunningVms, locality_of
from kvplace.core.placement import Placement
from kvplace.core.request import Policy, Request, Scope

_SMALL_MACHINE = 16
"""CPUs up to which every choice of CPUs is tried."""
_MOST_EFFORT = 80_000
"""Effort beyond that for three moves, and for choices of CPUs that differ in their cores only; counted anew
for each number of moves."""
_MOST_EQUALS = 24
"""Equally cheap answers looked at for the one in which the new VM sits best."""


@dataclass(frozen=True, slots=True)
class Found:
    """An answer; smaller keys are better."""

    key: tuple[int, tuple[int, ...]]
    """(bytes moved, how the new VM sits)."""
    steps: tuple[Step, ...]
    seated: Seated


class RoomSearch:
    """The search for one new VM on one machine."""

    def __init__(
        self,
        running_vms: RunningVms,
        request: Request,
        empty: Placement,
        fixed: frozenset[str],
        *,
        thorough: bool,
    ) -> None:
        self._running_vms = running_vms
        self._topology = running_vms.topology
        self._steps = Steps(running_vms, request, len(empty.numa_nodes))
        self._ideal = self._sits(empty)
        self._movable = {
            uid: one
            for uid, one in running_vms.occupants.items()
            if uid not in fixed and one.request.options.policy is not Policy.IMMOVABLE
        }
        self._counts = Counts(running_vms, self._movable)
        self._reachable = running_vms.free(dict.fromkeys(self._movable)).pool
        self._newcomer = newcomer(running_vms, request, len(empty.numa_nodes), self._reachable)
        self._wishes: dict[str, Wish] = {}
        self._kinds: dict[str, object] = {}
        self._thorough = thorough or self._topology.cpus.bit_count() <= _SMALL_MACHINE
        self._best: Found | None = None
        self._equals = 0
        self._seen: set[object] = set()
        self._unordered: list[tuple[Region, tuple[Step, ...]]] = []

    def best(self, most_moves: int) -> Found | None:
        """Find the answer with the fewest moves, of these the cheapest."""
        by_l3 = any(
            request.options.scope is Scope.ONE_L3
            for request in (self._newcomer.request, *(one.request for one in self._movable.values()))
        )
        if not self._counts.ever(self._newcomer):
            return None
        for count in range(1, most_moves + 1):
            self._seen.clear()
            self._steps.effort = 0
            self._kinds = self._kinds_of_vms(by_l3=by_l3 or count < 3 or self._thorough)
            if count == 3:
                self._stop_on_the_way()
            for region in self._newcomer.regions:
                self._look(region, (), count, 0)
            if self._best is not None:
                return self._best
        return None

    # One level of the search: something is short, and one more VM has to go somewhere.

    def _clear(self, newcomer: Region, steps: tuple[Step, ...], leaver: Wish, left: int, cost: int) -> None:
        gone = frozenset((leaver.id, *(step.wish.id for step in steps)))
        for region in leaver.regions:
            if not left and not self._counts.has_room(region, leaver, gone):
                continue
            total = cost + region.moved
            if not self._worth(total):
                return  # the regions after it cost no less
            self._look(newcomer, (*steps, Step(leaver, region)), left, total)

    def _look(self, newcomer: Region, steps: tuple[Step, ...], left: int, cost: int) -> None:
        if len(steps) + left == 3 and self._steps.effort > self._most_effort:
            return
        key = (newcomer.cpus, frozenset((step.wish.id, step.region.cpus) for step in steps))
        if key in self._seen:
            return
        self._seen.add(key)
        self._steps.effort += 1
        items = [(self._newcomer, newcomer), *((step.wish, step.region) for step in steps)]
        gone = frozenset(step.wish.id for step in steps)
        if not left:
            if next(self._counts.shortages(items, gone), None) is None:
                self._try(newcomer, steps)
            return
        candidates: list[str] | None = None
        for short in self._counts.shortages(items, gone):
            able = short.leavers(gone, left)
            if not able:
                return
            if candidates is None or len(able) < len(candidates):
                candidates = able
        kinds: set[object] = set()
        for uid in candidates if candidates is not None else self._around(newcomer, steps):
            kind = self._kinds[uid]
            if kind not in kinds:
                kinds.add(kind)
                self._clear(newcomer, steps, self._wish(uid), left - 1, cost)

    def _worth(self, cost: int) -> bool:
        if self._best is None or cost < self._best.key[0]:
            return True
        return cost == self._best.key[0] and self._best.key[1] > self._ideal and self._equals < _MOST_EQUALS

    def _around(self, newcomer: Region, steps: Sequence[Step]) -> list[str]:
        """The VMs in all these regions: where counts see nothing short, any of them may be in the way."""
        cpus, nodes = newcomer.cpus, newcomer.nodes
        for step in steps:
            cpus |= step.region.cpus
            nodes |= step.region.nodes
        gone = {step.wish.id for step in steps}
        return [
            uid
            for uid, one in self._movable.items()
            if uid not in gone and (one.placement.cpus & cpus or nodes & one.placement.memory.keys())
        ]

    # Trying.

    def _try(self, newcomer: Region, steps: tuple[Step, ...]) -> None:
        orders = [order for order in permutations(steps) if self._counts.in_turn(order)]
        least = sum(step.region.moved for step in steps)
        if not self._cheapest(orders, newcomer, least) and len(steps) == 2:
            self._unordered.append((newcomer, steps))

    def _cheapest(self, orders: Sequence[tuple[Step, ...]], newcomer: Region, least: int) -> bool:
        """Keep the cheapest way to take steps, in one of these orders; `least` is what it must cost."""
        cost: int | None = None
        for order in orders:
            if (seated := self._steps.carried_out(order, newcomer)) is not None:
                cost = self._keep(order, seated)
                if cost <= least:
                    return True
        for order in orders:
            while cost is None or cost > least:
                below = cost if cost is not None else self._best.key[0] + 1 if self._best else None
                seated = self._steps.any_way(order, self._most_effort, below)
                if seated is None:
                    break
                cost = self._keep(order, seated)
        return cost is not None

    def _stop_on_the_way(self) -> None:
        """Try the pairs of VMs that cannot simply go, since each is in the other's way, with a stop.

        Half of the effort is left for three VMs that move.
        """
        most = self._most_effort // 2
        for region, steps in self._unordered:
            for first, second in permutations(steps):
                for stop in first.wish.regions:
                    if self._steps.effort > most:
                        return
                    if not self._worth(second.region.moved + max(stop.moved, first.region.moved)):
                        break
                    order = (Step(first.wish, stop), second, first)
                    if self._counts.in_turn(order):
                        self._cheapest([order], region, second.region.moved + first.region.moved)

    @property
    def _most_effort(self) -> int:
        return 1 << 60 if self._thorough else _MOST_EFFORT

    def _keep(self, steps: tuple[Step, ...], seated: Seated) -> int:
        """Remember an answer if it is the best, and say what it costs."""
        key = (cost_of(self._running_vms, steps, seated.places), self._sits(seated.placement))
        if self._best is not None and key[0] == self._best.key[0]:
            self._equals += 1
        if self._best is None or key < self._best.key:
            self._best = Found(key, steps, seated)
        return key[0]

    def _sits(self, placement: Placement) -> tuple[int, ...]:
        cores = {self._topology.core_of[cpu] for cpu in cpus_of(placement.cpus)}
        return (*locality_of(self._topology, placement), len(placement.l3_groups), len(cores))

    # What is known of the running VMs.

    def _wish(self, uid: str) -> Wish:
        wish = self._wishes.get(uid)
        if wish is None:
            wish = self._wishes[uid] = mover(self._running_vms, self._movable[uid], self._reachable)
        return wish

    def _kinds_of_vms(self, *, by_l3: bool) -> dict[str, object]:
        """Sort the VMs that may move into kinds: one of a kind makes as much room as another."""
        kinds: dict[str, object] = {}
        holders: dict[int, set[str]] = {}
        usable = self._running_vms.usable
        for uid, one in self._running_vms.occupants.items():
            for cpu in cpus_of(one.placement.cpus | one.placement.owned):
                holders.setdefault(self._topology.core_of[cpu], set()).add(uid)
        for uid, one in self._movable.items():
            taken = (one.placement.cpus | one.placement.owned) & usable
            cores = [core for core in self._topology.cores_in(self._topology.cpus) if core & taken]
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
                            self._cell(core, by_l3),
                            core.bit_count(),
                            (core & usable).bit_count(),
                            (core & taken).bit_count(),
                        )
                        for core in cores
                    )
                ),
            )
        return kinds

    def _cell(self, core: int, by_l3: bool) -> tuple[object, ...]:
        topology = self._topology
        groups = tuple(index for index, l3 in enumerate(topology.l3_groups) if l3 & core) if by_l3 else ()
        return topology.packages_of(core), topology.nodes_of(core), groups
