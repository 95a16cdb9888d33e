"""Which cores of one NUMA set serve the VM: all need in one, in equal shares, or from whole pools.

Equal shares go to groups of segments: the sockets or the NUMA nodes of the set, as many of them as can give
equal shares. The others give memory alone. The choice of groups and shares is a multiple-choice knapsack,
solved by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import product
from operator import sub

from kvplace.core.allocator.available_units import AvailableUnits
from kvplace.core.allocator.core_choice import NO_CORES, CoreChoice, CoreSearch, CoreShare, lower_bound
from kvplace.core.allocator.layout import L3Part, NodePart, Segment
from kvplace.core.allocator.numa_sets import NumaSet, most_shares_of, spread_groups
from kvplace.core.allocator.objectives import LEAST_CORES, CoreRank, fragmentation_cost, summed
from kvplace.core.cpuset import union
from kvplace.core.free_resources import crowd
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, CpuMask, NumaIndex
from kvplace.core.search_budget import SearchBudget

_CORE_STEPS = 60_000
"""Steps of the bounds of NUMA sets and of all searches for cores, of one question."""
_NO_SHARE = LEAST_CORES._replace(l3_groups=1 << 20)
"""More L3 groups than there are, for a share that cannot be served."""

_Ways = dict[tuple[int, int], CoreChoice]
"""The best choice for each number of groups and number of larger shares."""


class GroupKnapsack:
    """Serves one question from NUMA sets; the shares of their common groups are remembered."""

    def __init__(self, available: AvailableUnits) -> None:
        self._available = available
        self.budget = SearchBudget(_CORE_STEPS)
        self._search = CoreSearch(self.budget, available.uses)
        self._shares: dict[Hashable, CoreChoice | None] = {}
        self._bounds_of_shares: dict[Hashable, tuple[tuple[int, int], tuple[int, int] | None]] = {}
        """The fewest L3 groups and cores that shares from groups take, and the same with one unit more."""
        self._pools: dict[int, int] = {}

    def serve(self, numa_set: NumaSet) -> CoreChoice | None:
        """Serve the VM from a NUMA set."""
        available = self._available
        if available.request.options.policy is Policy.NUMA:
            return self._whole_pool(numa_set)
        if not available.spreads:
            return self._choose(numa_set, list(numa_set.segments), available.need)
        groups = spread_groups(available, numa_set)
        count = most_shares_of(available, numa_set)
        if count < len(groups):
            # The VM uses the others for their memory alone.
            groups.sort(key=lambda group: -available.segment_units(group))
            found = self._serve_some(numa_set, groups, count)
            if found is not None:
                return found
            largest = [options[0] for options in _groups_beside(numa_set, groups)]
            groups.sort(key=lambda group: not any(group is other for other in largest))
        return self._serve_each(numa_set, groups[:count])

    def _l3_parts(self, numa_set: NumaSet, segments: Sequence[Segment]) -> list[L3Part]:
        available = self._available
        if numa_set.domain.shares_l3:
            return available.l3_parts_of(segments)
        return [available.l3_part((segment,)) for segment in segments]

    # Equal shares.

    def _serve_some(
        self, numa_set: NumaSet, groups: Sequence[Sequence[Segment]], count: int
    ) -> CoreChoice | None:
        """Share the need out over the `count` groups that serve it best, with one beside each device."""
        best: CoreChoice | None = None
        for must in product(*_groups_beside(numa_set, groups)):
            found = self._serve_with(numa_set, groups, count, must)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
        return best

    def _serve_with(
        self,
        numa_set: NumaSet,
        groups: Sequence[Sequence[Segment]],
        count: int,
        must: Sequence[Sequence[Segment]],
    ) -> CoreChoice | None:
        """Share the need out over the best groups and the required ones, by dynamic programming.

        Where L3 groups hold several groups, it adds one L3 group after the other: the first group in an L3
        group costs more than the next.
        """
        low, over = divmod(self._available.need, count)
        as_one = _share_l3(groups)
        classes: dict[int, list[Sequence[Segment]]] = {}
        for number, segments in enumerate(groups):
            classes.setdefault(segments[0].l3 if as_one else number, []).append(segments)
        ways: _Ways = {(0, 0): NO_CORES}
        for members in classes.values():
            inside: _Ways = {(0, 0): NO_CORES}
            for segments in members:
                self.budget.spend(2 * len(inside) * len(ways))
                if self.budget.is_spent:
                    return None
                shares = {
                    (1, more): self._share(numa_set, segments, low + more, as_one=as_one)
                    for more in (0, 1)
                    if more <= over
                }
                options = {way: share for way, share in shares.items() if share is not None}
                if not any(segments is other for other in must):
                    options[0, 0] = NO_CORES
                inside = _combined(inside, options, (count, over))
            if as_one:
                inside = {
                    way: choice.on_l3_groups(1) if choice.taken else choice for way, choice in inside.items()
                }
            ways = _combined(ways, inside, (count, over))
        return ways.get((count, over))

    def _share(
        self, numa_set: NumaSet, segments: Sequence[Segment], need: int, *, as_one: bool = False
    ) -> CoreChoice | None:
        """Serve a share of the need from one group.

        With `as_one` the number of L3 groups does not matter.
        """
        key = (tuple([segment.cpus for segment in segments]), need, as_one)
        if key not in self._shares:
            self._shares[key] = self._choose(numa_set, segments, need, as_one=as_one)
        return self._shares[key]

    def _choose(
        self, numa_set: NumaSet, segments: Sequence[Segment], need: int, *, as_one: bool = False
    ) -> CoreChoice | None:
        """Choose cores from segments, with a CPU beside each device there."""
        available = self._available
        l3_parts = [available.l3_part(segments)] if as_one else self._l3_parts(numa_set, segments)
        found = self._search.choose(l3_parts, need)
        if found is None or not numa_set.beside:
            return found
        beside = [near for near in numa_set.beside if any(segment.node in near for segment in segments)]
        cpus = union(share.cpus for share in found.taken)
        nodes = {segment.node for segment in segments if segment.cpus & cpus}
        if not any(nodes.isdisjoint(near) for near in beside):
            return found
        return self._beside_each(segments, beside, need)

    def _beside_each(
        self, segments: Sequence[Segment], beside: Sequence[frozenset[NumaIndex]], need: int
    ) -> CoreChoice | None:
        """Choose cores from segments, at least one unit beside each device."""
        groups: list[list[Segment]] = [[] for _ in range(len(beside) + 1)]
        for segment in segments:
            near = [number for number, nodes in enumerate(beside) if segment.node in nodes]
            groups[near[0] if near else -1].append(segment)
        by_group = [self._available.l3_parts_of(group) for group in groups]
        l3_of = {segment.cpus: segment.l3 for segment in segments}

        def choose(l3_parts: Sequence[L3Part]) -> CoreChoice | None:
            rest = iter(l3_parts)
            found = self._one_of_each([[next(rest) for _ in group] for group in by_group], need)
            if found is None:
                return None
            cpus = union(share.cpus for share in found.taken)
            l3_groups = len({l3 for here, l3 in l3_of.items() if here & cpus})
            return found.on_l3_groups(l3_groups).of_kinds(1)

        return self._search.of_fewest_kinds([one for group in by_group for one in group], choose)

    def _one_of_each(self, groups: Sequence[Sequence[L3Part]], need: int) -> CoreChoice | None:
        """Choose cores from all groups, from each but the last at least one unit, by dynamic programming."""
        ways = {0: NO_CORES}
        for number, l3_parts in enumerate(groups):
            least = int(number < len(groups) - 1)
            most = min(need, sum([one.units for one in l3_parts]))
            shares = [self._search.of_any_kind(l3_parts, units) for units in range(least, most + 1)]
            longer: dict[int, CoreChoice] = {}
            for units, before in ways.items():
                for way, share in enumerate(shares, start=units + least):
                    if share is not None and way <= need:
                        together = _together((before, share))
                        if way not in longer or together.rank < longer[way].rank:
                            longer[way] = together
            ways = longer
        return ways.get(need)

    def _serve_each(self, numa_set: NumaSet, groups: Sequence[Sequence[Segment]]) -> CoreChoice | None:
        """Serve each group by itself; groups where one more unit is necessary or cheapest get it."""
        low, over = divmod(self._available.need, len(groups))
        as_one = _share_l3(groups)
        shares: dict[int, CoreChoice] = {}
        larger: list[tuple[tuple[int, ...], int, CoreChoice]] = []
        for index, segments in enumerate(groups):
            share = self._share(numa_set, segments, low, as_one=as_one)
            more = self._share(numa_set, segments, low + 1, as_one=as_one) if over else None
            if share is not None:
                shares[index] = share
            if more is not None:
                before = share.rank if share is not None else _NO_SHARE
                larger.append((tuple(map(sub, more.rank, before)), index, more))
        costly = sorted(larger, key=lambda entry: entry[:2])
        shares |= {index: more for _, index, more in costly[:over]}
        if len(larger) < over or len(shares) < len(groups):
            return None
        served = _together([shares[index] for index in range(len(groups))])
        if as_one:
            return served.on_l3_groups(len({segments[0].l3 for segments in groups}))
        return served

    # Pools.

    def _whole_pool(self, numa_set: NumaSet) -> CoreChoice:
        """Policy `numa`: all CPUs of the shared pool there, the less crowded the better."""
        l3_parts = self._l3_parts(numa_set, list(numa_set.segments))
        taken = [CoreShare(core, core) for one in l3_parts for core, _ in one.cores]
        return CoreChoice(LEAST_CORES._replace(uses=self._crowd(numa_set)), tuple(taken))

    def _crowd(self, numa_set: NumaSet) -> int:
        available = self._available
        uses = [use for segment in numa_set.segments for use in available.uses_of(segment)]
        return crowd(uses, available.need)

    # Lower bounds of choices, far cheaper than the choices.

    def bound(self, numa_set: NumaSet) -> CoreRank:
        """Return a lower bound for all choices inside the NUMA set."""
        available = self._available
        if available.request.options.policy is Policy.NUMA:
            lost = 0
            for part in numa_set.parts:
                if part.cpus not in self._pools:
                    pool = NO_CPUS
                    for segment in part.segments:
                        pool |= available.free.pool & segment.cpus
                    self._pools[part.cpus] = fragmentation(available, (part,), pool)
                lost += self._pools[part.cpus]
            return LEAST_CORES._replace(uses=self._crowd(numa_set), fragmentation=lost)
        shares = most_shares_of(available, numa_set) if available.spreads else 1
        if available.spreads and not numa_set.domain.shares_l3:
            l3_groups, cores = self._bound_of_shares(numa_set, shares)
        elif available.spreads or len(numa_set.parts) > 1:
            l3_groups, cores = lower_bound(self._l3_parts(numa_set, list(numa_set.segments)), available.need)
        else:
            l3_groups, cores = available.count(numa_set.parts[0]).least_for(available.need)
        lost = self._least_lost(numa_set) if available.request.owns_cpus else 0
        return CoreRank(l3_groups, shares, cores, self._least_uses(numa_set), lost)

    def _least_uses(self, numa_set: NumaSet) -> int:
        if not self._available.uses:
            return 0
        uses = [use for segment in numa_set.segments for use in self._available.uses_of(segment)]
        return sum(sorted(uses)[: self._available.need])

    def _least_lost(self, numa_set: NumaSet) -> int:
        """The least fragmentation cost in NUMA nodes: free units are worth most together in one."""
        free = [(self._available.free.cpus & part.cpus).bit_count() for part in numa_set.parts]
        left = max(0, sum(free) - self._available.need)
        return sum([fragmentation_cost(amount, 0) for amount in free]) - fragmentation_cost(left, 0)

    def _bound_of_shares(self, numa_set: NumaSet, count: int) -> tuple[int, int]:
        """L3 groups and cores that so many equal shares take at least."""
        groups = spread_groups(self._available, numa_set)
        if count < len(groups):
            return lower_bound(self._l3_parts(numa_set, list(numa_set.segments)), self._available.need, count)
        low, over = divmod(self._available.need, len(groups))
        l3_groups = cores = 0
        larger: list[tuple[int, int]] = []
        for segments in groups:
            (count, opened), more = self._bound_of_share(numa_set, segments, low)
            l3_groups += count
            cores += opened
            if more is not None:
                larger.append((more[0] - count, more[1] - opened))
        for more_groups, more_opened in sorted(larger)[:over]:
            l3_groups += more_groups
            cores += more_opened
        return (l3_groups, cores)

    def _bound_of_share(
        self, numa_set: NumaSet, segments: Sequence[Segment], low: int
    ) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """The least that a share takes, and with one unit more."""
        key = (low, *[segment.cpus for segment in segments])
        if key not in self._bounds_of_shares:
            l3_parts = self._l3_parts(numa_set, segments)
            more = sum([one.units for one in l3_parts]) > low
            self._bounds_of_shares[key] = (
                lower_bound(l3_parts, low),
                lower_bound(l3_parts, low + 1) if more else None,
            )
        return self._bounds_of_shares[key]


def _share_l3(groups: Sequence[Sequence[Segment]]) -> bool:
    """Whether an L3 group holds several of the groups; each of them then lies in one L3 group."""
    inside = {(segment.l3, index) for index, segments in enumerate(groups) for segment in segments}
    return len(inside) > len({l3 for l3, _ in inside})


def _groups_beside(numa_set: NumaSet, groups: Sequence[Sequence[Segment]]) -> list[list[Sequence[Segment]]]:
    """The groups beside each device, in their order; one of these must give CPUs."""
    return [
        [group for group in groups if any(segment.node in near for segment in group)]
        for near in numa_set.beside
    ]


def _combined(ways: _Ways, others: _Ways, most: tuple[int, int]) -> _Ways:
    """The best of all ways to take one of each."""
    combined: _Ways = {}
    for (number, larger), before in ways.items():
        for (more_groups, more_larger), share in others.items():
            way = (number + more_groups, larger + more_larger)
            if way[0] <= most[0] and way[1] <= most[1]:
                together = _together((before, share))
                if way not in combined or together.rank < combined[way].rank:
                    combined[way] = together
    return combined


def _together(shares: Sequence[CoreChoice]) -> CoreChoice:
    return CoreChoice(
        summed([share.rank for share in shares]), tuple([taken for share in shares for taken in share.taken])
    )


def fragmentation(available: AvailableUnits, parts: Sequence[NodePart], owned: CpuMask) -> int:
    """The cost to later VMs of taking CPUs, in NUMA nodes and in L3 groups."""
    lost = 0
    for part in parts:
        if owned & part.cpus:
            lost += _lost(available.free.cpus & part.cpus, owned)
            lost += sum([_lost(available.free.cpus & segment.cpus, owned) for segment in part.segments])
    return lost


def _lost(free: CpuMask, owned: CpuMask) -> int:
    before = free.bit_count()
    return fragmentation_cost(before, before - (free & owned).bit_count())
