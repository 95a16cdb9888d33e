"""Trying moves without carrying them out: does every VM get CPUs in its target, one step after the other?

A step takes only resources that are free at that moment. A VM's own CPUs and memory count as free for it, and
are used again only where nothing else is possible. So no CPU has two owners at any time.

A VM may take one set of CPUs of each kind in its target. Cores are of one kind when they have equally many
threads, lie in the same NUMA node, package and L3 group, and have equally many threads free and equally many
in the hands of each VM that moves later. Of cores of one kind it makes no difference which ones a VM takes.
Sets are generated one at a time, since there may be very many: the search stops when its budget is used up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, product

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cpuset import cpus_of, lowest, mask_of
from kvplace.core.free_resources import Free
from kvplace.core.moves.targets import Step, Target, VmToPlace
from kvplace.core.occupant import RunningVms, bytes_moved, keeps_memory, locality_of
from kvplace.core.placement import Placement
from kvplace.core.request import Policy, Request, Smt
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask
from kvplace.core.search_budget import LOOKUP, PLACEMENT, WatchedBudget
from kvplace.core.topology import Topology


@dataclass(frozen=True, slots=True)
class Trial:
    """Steps that can be taken, and the placements after them."""

    steps: tuple[Step, ...]
    placements: tuple[Placement, ...]
    """Of the VM of each step after it."""
    placement: Placement
    """Of the new VM after all steps."""


class StepTrials:
    """Tries sequences of steps for one new VM."""

    def __init__(self, running: RunningVms, request: Request, most_nodes: int, budget: WatchedBudget) -> None:
        self._running = running
        self._topology = running.topology
        self._request = request
        self._most_nodes = most_nodes
        self._budget = budget
        self._answers: dict[tuple[Free, Request], Placement | None] = {}

    def try_steps(self, steps: tuple[Step, ...], target: Target) -> Trial | None:
        """Take the steps in this order, each VM where the allocator puts it.

        The first try keeps the future CPUs of the new VM free of the others; the second does not.
        """
        all_gone = self._running.free({step.vm.id: None for step in steps})
        kept = self._place(all_gone.within(target.cpus), self._request)
        if kept is None:
            return None
        for aside in (kept.cpus | kept.owned, 0):
            if (trial := self._in_turn(steps, aside)) is not None:
                return trial
        return None

    def _in_turn(self, steps: tuple[Step, ...], aside: int) -> Trial | None:
        now: dict[str, Placement | None] = {}
        placements: list[Placement] = []
        for step in steps:
            uid = step.vm.id
            found = self._take(step, self._running.free({**now, uid: None}), aside)
            if found is None:
                return None
            now[uid] = found
            placements.append(found)
        return self._trial(steps, now, tuple(placements))

    def _take(self, step: Step, free: Free, aside: int) -> Placement | None:
        """Place a VM in its target: on CPUs that it does not have yet if possible, else with its own."""
        cpus, before = step.target.cpus, step.vm.before
        assert before is not None
        choices: tuple[int, ...]
        if step.vm.request.options.policy is Policy.NUMA:
            choices = (cpus,)
        elif step.vm.owns:
            choices = (cpus & ~aside & ~before.cpus & ~before.owned, cpus & ~aside)
        else:
            spare = aside if self._request.owns_cpus else 0
            choices = (cpus & ~free.cpus & ~spare, cpus & ~spare)  # with other sharing VMs first
        for choice in choices:
            if (found := self._place_mover(step.vm, free.within(choice))) is not None:
                return found
        return None

    def try_all_cpus(self, steps: tuple[Step, ...], below: int | None = None) -> Trial | None:
        """Take the steps in this order, each VM on every choice of CPUs that makes a difference.

        Fewer bytes than `below` may go to other NUMA nodes. Exact while the budget lasts.
        """
        return self._every(steps, {}, (), below)

    def _every(
        self,
        steps: tuple[Step, ...],
        now: dict[str, Placement | None],
        placements: tuple[Placement, ...],
        below: int | None,
    ) -> Trial | None:
        if below is not None and moved_bytes(self._running, steps[: len(placements)], placements) >= below:
            return None
        if len(placements) == len(steps):
            return self._trial(steps, now, placements)
        step = steps[len(placements)]
        uid = step.vm.id
        free = self._running.free({**now, uid: None})
        later = tuple(other.vm.before for other in steps[len(placements) + 1 :])
        for cpus in cpu_choices(self._topology, step.vm, free, step.target.cpus, later):
            if self._budget.exceeded():
                return None
            found = self._place_mover(step.vm, free.within(cpus))
            if found is None or (step.vm.owns and found.owned != cpus):
                continue
            trial = self._every(steps, {**now, uid: found}, (*placements, found), below)
            if trial is not None:
                return trial
        return None

    def _trial(
        self, steps: tuple[Step, ...], now: dict[str, Placement | None], placements: tuple[Placement, ...]
    ) -> Trial | None:
        """Place the new VM after the steps; None when it would use too many NUMA nodes."""
        found = self._place(self._running.free(now), self._request)
        if found is None or len(found.numa_nodes) > self._most_nodes:
            return None
        return Trial(steps, placements, found)

    def _place_mover(self, vm: VmToPlace, free: Free) -> Placement | None:
        """Place a VM that moves; None when its locality would be worse than before all moves.

        None also when memory would have to move and cannot.
        """
        found = self._place(free, vm.request)
        assert vm.before is not None
        if found is None or locality_of(self._topology, found) > locality_of(self._topology, vm.before):
            return None
        if vm.request.device_nodes and not keeps_memory(vm.request, vm.before, found):
            return None
        return found

    def _place(self, free: Free, request: Request) -> Placement | None:
        key = (free, request)
        self._budget.spend(LOOKUP)
        if key not in self._answers:
            self._budget.spend(PLACEMENT)
            self._answers[key] = try_place(self._topology, free, request)
        return self._answers[key]


def moved_bytes(running: RunningVms, steps: Sequence[Step], placements: Sequence[Placement]) -> int:
    """Sum up the bytes that go to other NUMA nodes when VMs take these steps."""
    return sum(
        bytes_moved(step.vm.request, running.occupants[step.vm.id].placement, after)
        for step, after in zip(steps, placements, strict=False)
    )


def cpu_choices(
    topology: Topology, vm: VmToPlace, free: Free, target: CpuMask, later: Sequence[Placement | None]
) -> Iterator[CpuMask]:
    """Yield the sets of CPUs for a VM in a target; `later` are the placements of VMs that move after it."""
    options = vm.request.options
    available = (free.cpus if vm.owns else free.pool) & target
    if options.policy is Policy.NUMA:
        yield available
        return
    uses = dict(free.uses) if not vm.owns else {}
    kinds: dict[tuple[object, ...], list[CpuMask]] = {}
    for core in topology.cores:
        part = core & available
        if not part or (vm.whole and part != core):
            continue
        positions = {
            (
                topology.nodes_of(mask_of([cpu])),
                topology.packages_of(mask_of([cpu])),
                _l3_of(topology, cpu),
                uses.get(cpu, 0),
            )
            for cpu in cpus_of(part)
        }
        held = tuple((core & one.cpus).bit_count() if one is not None else 0 for one in later)
        alike = len(positions) == 1
        kind = (alike or core, frozenset(positions), core.bit_count(), part.bit_count(), held)
        kinds.setdefault(kind, []).append(part)
    yield from _combined([(kind[0] is True, cores) for kind, cores in kinds.items()], vm)


def _l3_of(topology: Topology, cpu: CpuId) -> int:
    return next(index for index, l3 in enumerate(topology.l3_groups) if l3 >> cpu & 1)


def _combined(kinds: Sequence[tuple[bool, Sequence[CpuMask]]], vm: VmToPlace) -> Iterator[CpuMask]:
    """Combine the units of each kind to as many as the VM needs."""
    most = [sum(core.bit_count() for core in cores) for _, cores in kinds]
    if vm.whole and vm.request.options.smt is not Smt.REQUIRE:
        most = [len(cores) for _, cores in kinds]

    def rest(index: int, need: int) -> Iterator[CpuMask]:
        if need <= 0:
            yield NO_CPUS
        elif sum(most[index:]) >= need:
            alike, cores = kinds[index]
            for units, cpus in _offers(alike, cores, vm, need):
                for others in rest(index + 1, need - units):
                    yield cpus | others

    return rest(0, vm.units)


def _offers(alike: bool, cores: Sequence[CpuMask], vm: VmToPlace, need: int) -> Iterator[tuple[int, CpuMask]]:
    """Yield (units, CPUs) that cores of one kind give, no more units than needed where that is possible."""
    if vm.whole:
        width = cores[0].bit_count() if vm.request.options.smt is Smt.REQUIRE else 1
        for count in range(min(len(cores), -(-need // width)) + 1):
            yield count * width, CpuMask(sum(cores[:count]))
    elif alike:
        for counts in _partitions(len(cores), cores[0].bit_count(), need):
            taken = [lowest(core, count) for core, count in zip(cores, counts, strict=False)]
            yield sum(counts), CpuMask(sum(taken))
    else:
        cpus = list(cpus_of(cores[0]))
        for chosen in product((0, 1), repeat=len(cpus)):
            if sum(chosen) <= need:
                yield sum(chosen), mask_of(compress(cpus, chosen))


def _partitions(cores: int, width: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of threads to take from each of some equal cores: never more from a later core."""
    if cores:
        for first in range(min(width, most), 0, -1):
            for others in _partitions(cores - 1, first, most - first):
                yield (first, *others)
    yield ()
