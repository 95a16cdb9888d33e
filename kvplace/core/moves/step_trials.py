"""Moves carried out on paper: does every VM find its CPUs in the region meant for it, one step at a time?

What a step may take is what is free when it is taken; a VM's own CPUs and memory count as free to it,
and are used again only where nothing else will do. So no CPU has two owners at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cpuset import cpus_of, lowest
from kvplace.core.free import Free
from kvplace.core.moves.targets import Region, Wish
from kvplace.core.occupant import RunningVms, bytes_moved, locality_of, within
from kvplace.core.placement import Placement
from kvplace.core.request import Policy, Request, Smt
from kvplace.core.topology import Topology

_LOOKED_UP, _FOUND = 5, 20
"""Effort of asking for a placement, and of finding it when it was not known yet, beside a look by counts."""


@dataclass(frozen=True, slots=True)
class Step:
    """One VM that is to go to one region."""

    wish: Wish
    region: Region


@dataclass(frozen=True, slots=True)
class Seated:
    """The new VM's place, and where each step has put its VM."""

    placement: Placement
    places: tuple[Placement, ...]


class Steps:
    """Tries sequences of moves for one new VM."""

    def __init__(self, running_vms: RunningVms, request: Request, most_nodes: int) -> None:
        self._running_vms = running_vms
        self._topology = running_vms.topology
        self._request = request
        self._most_nodes = most_nodes
        self._answers: dict[tuple[Free, Request], Placement | None] = {}
        self.effort = 0
        """What the search has cost so far, counted and not timed; whoever searches adds 1 for each look."""

    def fits_well(self, free: Free) -> Placement | None:
        """Place the new VM, or None when it would not lie well."""
        found = self._place(free, self._request)
        return None if found is None or len(found.numa_nodes) > self._most_nodes else found

    def carried_out(self, steps: Sequence[Step], newcomer: Region) -> Seated | None:
        """Take the steps in this order, the new VM's CPUs kept aside first, else not."""
        everybody_gone = self._running_vms.free({step.wish.id: None for step in steps})
        kept = self._place(within(everybody_gone, newcomer.cpus), self._request)
        if kept is None:
            return None
        for aside in (kept.cpus | kept.owned, 0):
            if (seated := self._in_turn(steps, aside)) is not None:
                return seated
        return None

    def _in_turn(self, steps: Sequence[Step], aside: int) -> Seated | None:
        now: dict[str, Placement | None] = {}
        places: list[Placement] = []
        for step in steps:
            uid = step.wish.id
            before = now.get(uid) or step.wish.before
            assert before is not None
            free = self._running_vms.free({**now, uid: None})
            place_ = self._seat(step, free, before, aside)
            if place_ is None:
                return None
            now[uid] = place_
            places.append(place_)
        found = self.fits_well(self._running_vms.free(now))
        return None if found is None else Seated(found, tuple(places))

    def _seat(self, step: Step, free: Free, before: Placement, aside: int) -> Placement | None:
        """Place a VM in its region: on CPUs that it does not have yet if possible, else with its own."""
        cpus = step.region.cpus
        choices: tuple[int, ...]
        if step.wish.request.options.policy is Policy.NUMA:
            choices = (cpus,)
        elif step.wish.owns:
            choices = (cpus & ~aside & ~before.cpus & ~before.owned, cpus & ~aside)
        else:
            spare = aside if self._request.owns_cpus else 0
            choices = (cpus & ~free.cpus & ~spare, cpus & ~spare)  # beside other sharing VMs first
        for choice in choices:
            if (found := self._sat(step.wish, within(free, choice))) is not None:
                return found
        return None

    def _sat(self, wish: Wish, free: Free) -> Placement | None:
        found = self._place(free, wish.request)
        assert wish.before is not None
        if found is None:
            return None
        worse = locality_of(self._topology, found) > locality_of(self._topology, wish.before)
        return None if worse else found

    def _place(self, free: Free, request: Request) -> Placement | None:
        key = (free, request)
        self.effort += _LOOKED_UP
        if key not in self._answers:
            self.effort += _FOUND
            self._answers[key] = try_place(self._topology, free, request)
        return self._answers[key]

    def any_way(self, steps: Sequence[Step], most_effort: int, below: int | None = None) -> Seated | None:
        """Take the steps in this order, each VM on every choice of CPUs that makes a difference.

        `below` is the number of bytes that may not be reached by what goes to other NUMA nodes. Exact as
        long as the effort stays below `most_effort`.
        """
        return self._every(steps, {}, (), most_effort, below)

    def _every(
        self,
        steps: Sequence[Step],
        now: dict[str, Placement | None],
        places: tuple[Placement, ...],
        most_effort: int,
        below: int | None,
    ) -> Seated | None:
        if below is not None and cost_of(self._running_vms, steps[: len(places)], places) >= below:
            return None
        if len(places) == len(steps):
            found = self.fits_well(self._running_vms.free(now))
            return None if found is None else Seated(found, places)
        step = steps[len(places)]
        uid = step.wish.id
        free = self._running_vms.free({**now, uid: None})
        owners = tuple(
            now.get(later.wish.id, later.wish.before)
            for later in steps[len(places) :]
            if later.wish.id != uid
        )
        for cpus in choices_of(self._topology, step.wish, free, step.region.cpus, owners):
            if self.effort > most_effort:
                return None
            found = self._sat(step.wish, within(free, cpus))
            if found is None or (step.wish.owns and found.owned != cpus):
                continue
            seated = self._every(steps, {**now, uid: found}, (*places, found), most_effort, below)
            if seated is not None:
                return seated
        return None


def choices_of(
    topology: Topology, wish: Wish, free: Free, region: int, others: Sequence[Placement | None]
) -> Iterator[int]:
    """Yield the sets of CPUs that a VM may take in a region, one of each kind.

    Cores are of one kind when they are equally wide, lie in the same NUMA node, socket and L3 group, and
    have as many CPUs free and as many in the hands of the same VMs among `others`.
    """
    available = (free.cpus if wish.owns else free.pool) & region
    if wish.request.options.policy is Policy.NUMA:
        yield available
        return
    uses = dict(free.uses) if not wish.owns else {}
    kinds: dict[tuple[object, ...], list[int]] = {}
    for core in topology.cores:
        part = core & available
        if not part or (wish.whole and part != core):
            continue
        sorts = {
            (
                topology.nodes_of(1 << cpu),
                topology.packages_of(1 << cpu),
                _l3_of(topology, cpu),
                uses.get(cpu, 0),
            )
            for cpu in cpus_of(part)
        }
        held = tuple((core & one.cpus).bit_count() if one is not None else 0 for one in others)
        alike = len(sorts) == 1
        kind = (alike or core, frozenset(sorts), core.bit_count(), part.bit_count(), held)
        kinds.setdefault(kind, []).append(part)
    yield from _taken([(kind[0] is True, cores) for kind, cores in kinds.items()], wish)


def _l3_of(topology: Topology, cpu: int) -> int:
    return next(index for index, l3 in enumerate(topology.l3_groups) if l3 >> cpu & 1)


def _taken(kinds: Sequence[tuple[bool, Sequence[int]]], wish: Wish) -> Iterator[int]:
    """Combine what each kind can give so that it is as many units as the VM needs."""
    offers = [list(_offers(alike, cores, wish)) for alike, cores in kinds]
    most = [max(units for units, _ in offer) for offer in offers]

    def rest(index: int, need: int) -> Iterator[int]:
        if need <= 0:
            yield 0
        elif sum(most[index:]) >= need:
            for units, cpus in offers[index]:
                if units <= need or wish.whole:
                    for others in rest(index + 1, need - units):
                        yield cpus | others

    yield from rest(0, wish.units)


def _offers(alike: bool, cores: Sequence[int], wish: Wish) -> Iterator[tuple[int, int]]:
    """Yield (units, CPUs): some of the cores of one kind, some CPUs of each."""
    if wish.whole:
        width = cores[0].bit_count() if wish.request.options.smt is Smt.REQUIRE else 1
        for count in range(len(cores) + 1):
            yield count * width, sum(cores[:count])
    elif alike:
        for counts in _descending(len(cores), cores[0].bit_count(), wish.units):
            yield sum(counts), sum(lowest(core, count) for core, count in zip(cores, counts, strict=True))
    else:
        cpus = list(cpus_of(cores[0]))
        for chosen in product((0, 1), repeat=len(cpus)):
            yield sum(chosen), sum(1 << cpu for cpu, taken in zip(cpus, chosen, strict=True) if taken)


def _descending(cores: int, width: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield how many CPUs of each of so many like cores: never more of a later one."""
    if not cores:
        yield ()
        return
    for first in range(min(width, most), -1, -1):
        for others in _descending(cores - 1, first, most - first):
            yield (first, *others)


def cost_of(running_vms: RunningVms, steps: Sequence[Step], places: Sequence[Placement]) -> int:
    """Sum up the bytes that the steps take to other NUMA nodes."""
    now: dict[str, Placement] = {}
    total = 0
    for step, after in zip(steps, places, strict=True):
        before = now.get(step.wish.id) or running_vms.occupants[step.wish.id].placement
        total += bytes_moved(step.wish.request, before, after)
        now[step.wish.id] = after
    return total
