"""The search for the victims of least cost on one node.

Least means, in kube-scheduler's own order: fewest disruption budgets violated, lowest highest priority,
smallest sum of priorities (each made positive, so fewer victims come before more), fewest victims; then the
best placement. The search goes through the first two from below. With a bound on both, it chooses in each
domain that may hold the VM (each socket, NUMA node or L3 group for `one-*`, else all CPUs) tenants with
enough CPUs for the missing ones: a branch and bound that counts CPUs, and places only where the count
suffices.

The search is a generator that pauses after each placement, so that its caller decides how long it may run
without letting others run. Equal questions have equal answers. Within its bounds the answer is the best one.
Beyond them it is the best so far, or the rest after as many as possible were spared one by one. No victim is
in vain: if any one is spared, the VM does not fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from kvplace.core.allocator.allocate import try_place
from kvplace.core.allocator.layout import layout_of
from kvplace.core.cluster.victims import (
    Cost,
    Question,
    Tenant,
    Victims,
    by_importance,
    eviction_cost,
    violated_by,
)
from kvplace.core.occupant import locality_of
from kvplace.core.placement import Placement
from kvplace.core.request import Smt
from kvplace.core.scalars import PodUid

MAX_PLACEMENTS = 300
"""Placements that one search asks for before it takes the best so far."""
MAX_STEPS = 30_000
"""Sets of victims that one search checks, most of them by counts."""
MAX_EQUALS = 16
"""Sets of least cost among which the one with the best placement is chosen."""

T = TypeVar("T")
Search = Generator[None, None, T]
"""A search that pauses at each `yield` and returns its answer."""


@dataclass(frozen=True, slots=True)
class _Domain:
    """CPUs that may hold the VM, and the VMs in the way there."""

    missing: int
    """CPUs that are not free."""
    tenants: tuple[tuple[Tenant, int], ...]
    """(tenant, CPUs that it gives back here), lowest priority first, then most CPUs."""
    elsewhere: frozenset[PodUid] = frozenset()
    """Tenants with nothing here, only with requests that kube-scheduler counts."""

    @property
    def fewest(self) -> int:
        """How many of the tenants must go at least."""
        return _fewest(_sums(self.tenants, 0), self.missing)

    @property
    def weakest(self) -> tuple[Tenant, ...]:
        """Tenants for a lower bound: in no part of the cost are sufficient tenants cheaper.

        The last one has the least priority such that tenants up to it give enough. The others have the lowest
        priorities, as many as must go at least.
        """
        given = list(accumulate(gain for _, gain in self.tenants))
        last = bisect_left(given, self.missing)
        if self.missing <= 0 or last == len(given):
            return ()
        highest = self.tenants[last][0]
        below = tuple(entry for entry in self.tenants if entry[0].priority <= highest.priority)
        others = _fewest(_sums(below, 0), self.missing) - 1
        return (*(one for one, _ in self.tenants[:others]), highest)


@dataclass
class _Best:
    """The best victims with a given bound on violations and priority."""

    chosen: tuple[Tenant, ...]
    total: tuple[int, int]
    """Sum of weights, number."""
    placement: Placement
    quality: tuple[int, ...]
    equals: int = 0


class VictimSearch:
    """Search for the victims on one node."""

    def __init__(
        self, question: Question, *, max_placements: int = MAX_PLACEMENTS, max_steps: int = MAX_STEPS
    ) -> None:
        self._question = question
        self._certain = frozenset(one.uid for one in question.certain)
        self._tenants = tuple(one for one in question.tenants if one.uid not in self._certain)
        self._placements: dict[frozenset[PodUid], Placement | None] = {}
        self._placements_left = max_placements
        self._steps_left = max_steps
        self._has_budgets = any(one.budgets for one in (*self._tenants, *question.certain))
        self._ideal: tuple[int, ...] = ()
        """The best quality of a placement without all tenants: no other victims have a better one."""
        self._domains = tuple(self._find_domains())
        self.answer: Victims | None = None
        """The victims of least cost, after `run`; None when the VM does not fit even without all tenants."""

    @property
    def least_cost(self) -> Cost:
        """A cost that no answer is below, without any placement."""
        certain = self._question.certain
        violated = self._violations(())
        costs = (eviction_cost((*certain, *domain.weakest), violated) for domain in self._domains)
        return min(costs, default=eviction_cost(certain, violated))

    def fits_without(self, tenants: frozenset[PodUid] = frozenset()) -> Search[Placement | None]:
        """Place the VM on the resources that are free without certain victims, leaving pods, and these."""
        gone = frozenset((*tenants, *self._certain))
        known = self._placements.get(gone, ...)
        if known is not ...:
            return known
        self._placements_left -= 1
        machine = self._question.machine
        free = machine.free_without(gone | self._question.leaving)
        placement = self._placements[gone] = try_place(machine.topology, free, self._question.request)
        yield
        return placement

    def run(self) -> Search[None]:
        """Search for the answer."""
        self.answer = yield from self._find()

    def _find(self) -> Search[Victims | None]:
        everybody = yield from self._serves(self._tenants)
        if everybody is None:
            return None
        nobody = yield from self._serves(())
        if nobody is not None:
            return self._answer((), nobody, exact=True)
        self._ideal = self._quality(everybody)
        certain = [one.priority for one in self._question.certain]
        levels = sorted({max((one.priority, *certain)) for one in self._tenants})
        for allowed in range(self._violations(()), self._violations(self._tenants) + 1):
            for highest in levels:
                group = tuple(
                    one
                    for one in self._tenants
                    if one.priority <= highest and self._violations((one,)) <= allowed
                )
                if (yield from self._serves(group)) is None:
                    continue
                found = yield from self._best_of(group, allowed)
                if found is not None:
                    exact = not self._is_exhausted
                    if not exact:
                        yield from self._spare(found)
                    return self._answer(found.chosen, found.placement, exact=exact)
                if self._is_exhausted:
                    spared = yield from self._spared(group)
                    return self._answer(spared.chosen, spared.placement, exact=False)
        spared = yield from self._spared(self._tenants)
        return self._answer(spared.chosen, spared.placement, exact=False)

    # One bound on violations and priority.

    def _best_of(self, group: tuple[Tenant, ...], allowed: int) -> Search[_Best | None]:
        """Find the smallest sum and number of victims of a group with so many violations at most."""
        uids = frozenset(one.uid for one in group)
        domains = sorted(self._domains, key=lambda one: one.fewest)
        best: _Best | None = None
        for domain in domains:
            here = _Domain(domain.missing, _members(domain, uids - domain.elsewhere))
            best = yield from self._branch(here, 0, (), 0, allowed, best)
        for domain in domains:  # known victims leave little to check here
            if domain.elsewhere:
                everybody = _Domain(domain.missing, _members(domain, uids))
                best = yield from self._branch(everybody, 0, (), 0, allowed, best)
        return best

    def _branch(
        self,
        domain: _Domain,
        first: int,
        chosen: tuple[Tenant, ...],
        freed: int,
        allowed: int,
        best: _Best | None,
    ) -> Search[_Best | None]:
        """Try `chosen`, and each way to add tenants from `first` on."""
        self._steps_left -= 1
        if self._is_exhausted:
            return best
        if freed >= domain.missing and chosen:
            placement = yield from self._serves(chosen)
            if placement is not None:
                return self._better(best, chosen, placement)
        sums = _sums(domain.tenants, first)
        more = max(1, _fewest(sums, domain.missing - freed))
        if more > len(sums):
            return best
        weight = sum(one.weight for one in chosen)
        for index in range(first, len(domain.tenants)):
            tenant, gain = domain.tenants[index]
            if best is not None:
                least = (weight + more * tenant.weight, len(chosen) + more)
                enough = best.equals >= MAX_EQUALS or best.quality == self._ideal
                if least > best.total or (least == best.total and enough):
                    break  # the next ones have no lower priority
            added = (*chosen, tenant)
            if self._violations(added) <= allowed:
                best = yield from self._branch(domain, index + 1, added, freed + gain, allowed, best)
        return best

    def _better(self, best: _Best | None, chosen: tuple[Tenant, ...], placement: Placement) -> _Best:
        total = (sum(one.weight for one in chosen), len(chosen))
        quality = self._quality(placement)
        if best is None or total < best.total:
            return _Best(chosen, total, placement, quality)
        if total == best.total:
            best.equals += 1
            if quality < best.quality:
                best.chosen, best.placement, best.quality = chosen, placement, quality
        return best

    # Beyond the bounds.

    def _spared(self, group: tuple[Tenant, ...]) -> Search[_Best]:
        """Spare as many of a group as possible, one by one, as kube-scheduler does."""
        placement = yield from self._serves(group)
        assert placement is not None, "a group is spared from only when the VM fits without it"
        found = _Best(group, (0, 0), placement, ())
        yield from self._spare(found)
        return found

    def _spare(self, found: _Best) -> Search[None]:
        """Spare each victim that is not needed."""
        ordered = by_importance(found.chosen)
        for one in sorted(ordered, key=lambda each: -violated_by((*self._question.certain, each))):
            fewer = tuple(other for other in found.chosen if other is not one)
            placement = yield from self._serves(fewer)
            if placement is not None:
                found.chosen, found.placement = fewer, placement

    # Steps of both.

    @property
    def _is_exhausted(self) -> bool:
        return self._steps_left <= 0 or self._placements_left <= 0

    def _serves(self, chosen: tuple[Tenant, ...]) -> Search[Placement | None]:
        """Place the VM without these tenants; None also where kube-scheduler would still find too little."""
        for name, amount in self._question.needed.items():
            if amount > sum(one.resources.get(name, 0) for one in (*chosen, *self._question.certain)):
                return None
        return (yield from self.fits_without(frozenset(one.uid for one in chosen)))

    def _violations(self, chosen: tuple[Tenant, ...]) -> int:
        if not self._has_budgets:
            return self._question.violations
        return self._question.violations + violated_by((*self._question.certain, *chosen))

    def _quality(self, placement: Placement) -> tuple[int, ...]:
        topology = self._question.machine.topology
        return (*locality_of(topology, placement), len(placement.l3_groups))

    def _answer(self, chosen: tuple[Tenant, ...], placement: Placement, *, exact: bool) -> Victims:
        everybody = by_importance((*self._question.certain, *chosen))
        return Victims(everybody, self._violations(chosen), placement, self._quality(placement), exact)

    def _find_domains(self) -> Iterator[_Domain]:
        question = self._question
        topology, request = question.machine.topology, question.request
        now = question.machine.free_without(question.leaving | self._certain)
        free = now.cpus if request.owns_cpus else now.pool
        needed = _least_cpus(question)
        claims = question.machine.ledger.claims
        has_needs = any(question.needed.values())
        for cpus in (domain.cpus for domain in layout_of(topology).domains[request.options.scope.within]):
            inside = cpus & topology.allocatable
            nodes = frozenset(topology.nodes_of(cpus))
            missing = needed - (free & inside).bit_count()
            members: list[tuple[Tenant, int]] = []
            elsewhere: list[PodUid] = []
            for one in self._tenants:
                claim = claims.get(one.uid)
                if claim is None:
                    continue
                gain = ((claim.cpus | claim.owned) & inside).bit_count()
                is_here = gain or not nodes.isdisjoint(claim.memory)
                if not is_here and has_needs:
                    elsewhere.append(one.uid)
                if is_here or has_needs:
                    members.append((one, gain))
            members.sort(key=lambda entry: entry[0].uid)
            members.sort(key=lambda entry: entry[0].since, reverse=True)
            members.sort(key=lambda entry: (entry[0].priority, -entry[1]))
            domain = _Domain(max(0, missing), tuple(members), frozenset(elsewhere))
            if domain.fewest <= len(members):
                yield domain


def _members(domain: _Domain, uids: frozenset[PodUid]) -> tuple[tuple[Tenant, int], ...]:
    return tuple(entry for entry in domain.tenants if entry[0].uid in uids)


def _least_cpus(question: Question) -> int:
    """How many free CPUs the VM needs at least."""
    request = question.request
    if not request.owns_cpus:
        return 1  # its CPUs may be in use already
    if request.options.smt is not Smt.ISOLATE:
        return request.vcpus
    threads = min((core.bit_count() for core in question.machine.topology.cores), default=1)
    return request.vcpus * threads


def _sums(tenants: tuple[tuple[Tenant, int], ...], first: int) -> tuple[int, ...]:
    """The most that one, two, ... tenants from `first` on give together."""
    return tuple(accumulate(sorted((gain for _, gain in tenants[first:]), reverse=True)))


def _fewest(sums: tuple[int, ...], missing: int) -> int:
    """How many tenants give back the shortfall; one more than there are if all do not suffice."""
    return 0 if missing <= 0 else bisect_left(sums, missing) + 1
