"""Which cores serve a need, out of given L3 groups: fewest L3 groups, fewest kinds of cores, fewest cores.

Of equal choices it takes the one that fragments the L3 groups least, or for a sharing VM the one that the
fewest other VMs use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

from kvplace.core.allocator.layout import L3Part
from kvplace.core.allocator.objectives import LEAST_CORES, CoreRank, fragmentation_cost
from kvplace.core.allocator.set_cover import L3Sets, fewest, least_cores, threads_beyond
from kvplace.core.cpuset import cpus_of, lowest, mask_of
from kvplace.core.scalars import CpuId, CpuMask
from kvplace.core.search_budget import SearchBudget

_MOST_TIES = 16
"""Sets of L3 groups of equal rank that are compared by cost."""


@dataclass(frozen=True, slots=True)
class CoreShare:
    """A VM's part of one core."""

    core: CpuMask
    """The core's available CPUs."""
    cpus: CpuMask
    """The CPUs of these that the VM uses, one for each unit."""


@dataclass(frozen=True, slots=True)
class CoreChoice:
    """Cores that serve a need."""

    rank: CoreRank
    """Its fragmentation is the cost in L3 groups alone."""
    taken: tuple[CoreShare, ...]

    def on_l3_groups(self, count: int) -> CoreChoice:
        """The choice when its L3 groups are counted otherwise."""
        return CoreChoice(self.rank._replace(l3_groups=count), self.taken)

    def of_kinds(self, count: int) -> CoreChoice:
        """The choice when its kinds of cores are counted otherwise."""
        return CoreChoice(self.rank._replace(kinds=count), self.taken)


NO_CORES = CoreChoice(LEAST_CORES, ())


class CoreSearch:
    """Chooses cores within a budget; `uses` counts the other VMs on each CPU when the VM shares its CPUs."""

    def __init__(self, budget: SearchBudget, uses: Mapping[CpuId, int]) -> None:
        self._budget = budget
        self._uses = uses
        self._known: dict[tuple[CpuMask, int], tuple[int, CpuMask]] = {}

    def choose(self, l3_parts: Sequence[L3Part], need: int) -> CoreChoice | None:
        """Serve a need, or return None when the L3 parts hold too little."""
        return self.of_fewest_kinds(l3_parts, lambda some: self.of_any_kind(some, need))

    def of_fewest_kinds(
        self,
        l3_parts: Sequence[L3Part],
        choose: Callable[[Sequence[L3Part]], CoreChoice | None],
    ) -> CoreChoice | None:
        """Choose from all L3 parts: the fewest L3 groups, then the fewest kinds of cores."""
        found = choose(l3_parts)
        if found is None or not any(one.kinds for one in l3_parts):
            return found
        kind_of = {
            core: kind for one in l3_parts for (core, _), kind in zip(one.cores, one.kinds, strict=True)
        }
        used = len({kind_of[share.core] for share in found.taken})
        for count in range(1, used):
            choices = [
                choose([one.only(kinds) for one in l3_parts])
                for kinds in combinations(sorted({*kind_of.values()}), count)
            ]
            as_few = [other for other in choices if other and other.rank.l3_groups == found.rank.l3_groups]
            if as_few:
                return min(as_few, key=lambda choice: choice.rank).of_kinds(count)
        return found.of_kinds(used)

    def of_any_kind(self, l3_parts: Sequence[L3Part], need: int) -> CoreChoice | None:
        """Serve a need from cores of any kinds; None when the L3 parts hold too little."""
        if not need:
            return NO_CORES
        self._budget.spend(10 + 2 * len(l3_parts))
        full = [one for one in l3_parts if one.units]
        if sum([one.units for one in full]) < need:
            return None
        if self._uses:
            full = sorted(full, key=self._use_of_each)
            chosen = (self._of(sets, need) for sets in self._smallest(full, need))
            return min(chosen, key=lambda choice: choice.rank)
        if fewest([one.units for one in full], need) == len(full):
            return self._of(full, need)
        best = min(
            self._smallest(full, need), key=lambda sets: (cores_needed(sets, need), _cost_of(sets, need))
        )
        return self._of(best, need)

    def _smallest(self, l3_parts: Sequence[L3Part], need: int) -> Iterator[Sequence[L3Part]]:
        """Yield sets with the fewest L3 parts; with the fewest cores of these, unless all such sets come."""
        count = fewest([one.units for one in l3_parts], need)
        if count == 1 or comb(len(l3_parts), count) <= _MOST_TIES:
            tight_first = combinations(sorted(l3_parts, key=lambda one: one.units), count)
            yield from (sets for sets in tight_first if sum([one.units for one in sets]) >= need)
            return
        sets = L3Sets(l3_parts, need, self._budget)
        count, cores, found = sets.smallest()
        yield [l3_parts[index] for index in found]
        for chosen in islice(sets.chosen(count, cores), _MOST_TIES):
            yield [l3_parts[index] for index in sorted(chosen)]

    def _of(self, l3_parts: Sequence[L3Part], need: int) -> CoreChoice:
        # The large groups are used up, and the smallest keeps the rest: small VMs that settle there do not
        # keep a large group broken after the end of this VM.
        ordered = sorted(l3_parts, key=lambda one: -one.units)
        cores = [core for one in ordered for core in one.cores]
        if self._uses:
            cores.sort(key=lambda core: self._least_used(*core)[0])
        taken = tuple(self._pick(cores, need))
        uses = cost = 0
        if self._uses:
            uses = sum([self._uses.get(cpu, 0) for share in taken for cpu in cpus_of(share.cpus)])
        else:
            cost = _cost_of(ordered, need)
        return CoreChoice(CoreRank(len(l3_parts), 1, len(taken), uses, cost), taken)

    def _pick(self, cores: Sequence[tuple[CpuMask, int]], need: int) -> Iterator[CoreShare]:
        """Cover a need with the fewest cores, the last one as tight as possible; they must suffice."""
        by_width: dict[int, list[CpuMask]] = {}
        for core, width in cores:
            by_width.setdefault(width, []).append(core)
        for width in sorted(by_width, reverse=True):
            same = by_width[width]
            whole = min(need // width, len(same))
            for core in same[:whole]:
                yield CoreShare(core, self._units_of(core, width))
            need -= whole * width
            if not need:
                return
            if whole < len(same):
                able = [other for other in sorted(by_width) if need <= other <= width]
                left = [core for other in able for core in by_width[other][whole if other == width else 0 :]]
                core = min(left, key=lambda core: self._least_used(core, need)[0]) if self._uses else left[0]
                yield CoreShare(core, self._units_of(core, need))
                return

    def _units_of(self, core: CpuMask, count: int) -> CpuMask:
        if core.bit_count() == count:
            return core
        return self._least_used(core, count)[1] if self._uses else lowest(core, count)

    def _least_used(self, core: CpuMask, count: int) -> tuple[int, CpuMask]:
        """The `count` least used CPUs of a core, after how often others use them."""
        known = self._known.get((core, count))
        if known is None:
            by_use = sorted([(self._uses.get(cpu, 0), cpu) for cpu in cpus_of(core)])[:count]
            known = sum([use for use, _ in by_use]), mask_of([cpu for _, cpu in by_use])
            self._known[core, count] = known
        return known

    def _use_of_each(self, one: L3Part) -> float:
        return sum([self._uses.get(cpu, 0) for core, _ in one.cores for cpu in cpus_of(core)]) / one.units


def _cost_of(l3_parts: Sequence[L3Part], need: int) -> int:
    smallest = min(l3_parts, key=lambda one: one.units)
    over = sum(one.units for one in l3_parts) - need
    cost = fragmentation_cost(smallest.units, over)
    return cost + sum(fragmentation_cost(one.units, 0) for one in l3_parts if one is not smallest)


def cores_needed(l3_parts: Sequence[L3Part], need: int) -> int:
    """The least number of cores of the L3 parts that cover a need; more than there are when all do not."""
    l3_parts = [one for one in l3_parts if one.units]
    width = l3_parts[0].widths[0]
    if all(one.widths[0] == width == one.widths[-1] for one in l3_parts):
        return -(-need // width)
    return fewest([width for one in l3_parts for width in one.widths], need)


def lower_bound(l3_parts: Sequence[L3Part], need: int, least: int = 0) -> tuple[int, int]:
    """How many L3 parts a need takes at least, and how many cores of so many; there must be as much.

    `least` states how many L3 parts it takes in any case.
    """
    if not need:
        return (0, 0)
    full = [one for one in l3_parts if one.units]
    count = max(least, fewest([one.units for one in full], need))
    widest = max([one.widths[0] for one in full])
    if all(one.widths[0] == widest == one.widths[-1] for one in full):
        return count, -(-need // widest)
    beyond = [threads_beyond(one.widths) for one in full]
    amounts = [[of_part[t] if t < len(of_part) else 0 for of_part in beyond] for t in range(widest)]
    amounts.append([sum(of_part) for of_part in beyond])
    reach = [sum(sorted(of_parts, reverse=True)[:count]) for of_parts in amounts]
    return count, least_cores(reach, need, widest)
