"""Which CPUs of given cores others use least, where a VM shares its CPUs.

The number of cores is fixed first, since fewer cores come before less used ones. With it a machine of two
threads a core also fixes how many cores give both; that leaves a choice which prices solve exactly. Wider
cores, on which a need can be made up in many ways, take a table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvplace.core.allocator.layout import Bin
from kvplace.core.cpuset import cpus_of, mask_of

CoreUse = tuple[int, int]
"""The available CPUs of a core, and those of them that are taken."""

_MOST_LOOKED_AT = 128
_NEVER = 1 << 60


class Offer:
    """One core, and what others use of it: of its least used CPU, of the two least used and so on."""

    def __init__(self, core: int, width: int, uses: Mapping[int, int]) -> None:
        self.core = core
        by_use = sorted([(uses.get(cpu, 0), cpu) for cpu in cpus_of(core)])[:width]
        self.cpus = [cpu for _, cpu in by_use]
        """The CPUs that it can give, the least used first."""
        self.costs = [0, *accumulate([use for use, _ in by_use])]
        self.first = by_use[0][0]
        self.second = by_use[1][0] if len(by_use) > 1 else _NEVER
        """The use of its second CPU, if it gives one."""

    def taken(self, units: int) -> CoreUse:
        """Take so many of its CPUs."""
        return (self.core, mask_of(self.cpus[:units]))


class Usage:
    """How many VMs use each CPU already, and what that makes of each core: worked out once for each."""

    def __init__(self, uses: Mapping[int, int]) -> None:
        self._uses = uses
        self._offers: dict[tuple[int, int], Offer] = {}
        self._worths: dict[tuple[int, int], dict[tuple[tuple[int, int], ...], int]] = {}
        self.prices: Prices | None = None
        """At which CPUs were found last."""
        self.looked_at = 0
        """How many cores were looked at for the least used ones."""

    @property
    def is_spent(self) -> bool:
        """Whether so many cores were looked at that a search settles for the best so far."""
        return self.looked_at > _MOST_LOOKED_AT

    def offers(self, cores: Sequence[tuple[int, int]]) -> list[Offer]:
        """What each of the cores, given with its units, can give at what price."""
        known = self._offers
        for core in cores:
            if core not in known:
                known[core] = Offer(*core, self._uses)
        return [known[core] for core in cores]

    def worths(self, prices: Prices, bins: Sequence[Bin]) -> list[int]:
        """How far the cores of each bin are below their price together, each if it is."""
        known = self._worths.setdefault((prices.core, prices.cpu), {})
        for one in bins:
            if one.cores not in known:
                known[one.cores] = prices.worth(self.offers(one.cores))
        return [known[one.cores] for one in bins]


@dataclass(frozen=True, slots=True)
class Prices:
    """What opening a core and what a CPU may cost, so that as many of both are worth it as are needed.

    Whatever they are, no choice can cost less than its cores and CPUs at these prices, less what they are
    worth beyond their price: `worth` of all that may be chosen.
    """

    core: int
    cpu: int

    def of(self, cores: int, cpus: int) -> int:
        """The price of so many of both."""
        return self.core * cores + self.cpu * cpus

    def worth(self, offers: Sequence[Offer]) -> int:
        """How far cores are below their price together, each if it is."""
        total = 0
        first, second = self.core + self.cpu, self.core + 2 * self.cpu
        for offer in offers:
            costs = offer.costs
            most = first - costs[1]
            if len(costs) == 3:
                both = second - costs[2]
                if both > most:
                    most = both
            elif len(costs) > 3:
                most = max([self.core + self.cpu * count - cost for count, cost in enumerate(costs) if count])
            if most > 0:
                total += most
        return total


@dataclass(frozen=True, slots=True)
class LeastUsed:
    """The least used CPUs of some cores."""

    cost: int
    """How many uses by others they have together."""
    taken: tuple[CoreUse, ...]
    prices: Prices


def least_used(
    offers: Sequence[Offer], need: int, count: int, touched: Sequence[int] = (), near: Prices | None = None
) -> LeastUsed:
    """Cover a need with exactly `count` cores, and of those with the CPUs that others use least.

    Every set of CPUs in `touched`, which have none in common, must give one. The answer is found soonest
    when its prices are `near` given ones.
    """
    near = near or likely_prices(offers, need, count)
    homes = [_home(offer.core, touched) for offer in offers] if touched else []
    if max([len(offer.cpus) for offer in offers]) <= 2:
        return _of_pairs(offers, homes, need, count, near.cpu)
    return _of_wide_cores(offers, homes, need, count)


def likely_prices(offers: Sequence[Offer], need: int, count: int) -> Prices:
    """Prices at which about so many cores, and CPUs of them, are worth it: a beginning for the search."""
    seconds = sorted([offer.second for offer in offers if offer.second < _NEVER])
    extra = min(need - count, len(seconds))
    rebate = seconds[extra - 1] if extra else 0
    prices = sorted([offer.first + min(0, offer.second - rebate) for offer in offers])
    return Prices(prices[count - 1] - rebate, rebate)


def _home(core: int, touched: Sequence[int]) -> int:
    for place, cpus in enumerate(touched):
        if core & cpus:
            return place
    return -1


_BOTH, _EITHER, _ONE, _BOTH_LAST = range(4)
"""How many CPUs a core gives at a rebate on the second; of one price the lower ones are chosen first."""

_Priced = tuple[int, int, int]
"""The price of a core, which CPUs it gives for that, and its place."""


def _of_pairs(offers: Sequence[Offer], homes: Sequence[int], need: int, count: int, near: int) -> LeastUsed:
    """Choose `count` cores of one or two CPUs; the need says how many of them give both.

    A rebate on second CPUs decides how many cores give both: every core takes what is cheaper after it, and
    the cheapest are chosen, after one of each set that must be touched. With the smallest rebate that makes
    enough pairs possible no other choice is cheaper; of cores that cost the same those that give both then
    step back one by one until there are no more pairs than needed.
    """
    pairs = need - count
    costs = [(offer.first, offer.second, place) for place, offer in enumerate(offers)]

    def chosen_at(rebate: int, stay: int = len(offers)) -> list[_Priced]:
        return _cheapest(_priced(costs, rebate, stay), homes, count)

    def is_enough(rebate: int) -> bool:
        return sum([gives != _ONE for _, gives, _ in chosen_at(rebate)]) >= pairs

    rebate = _first_that(is_enough, max([offer.costs[-1] for offer in offers]), near)
    chosen = chosen_at(rebate)
    if _number_of_both(chosen) > pairs:
        back = bisect_left(
            range(len(offers)),
            -pairs,
            key=lambda back: -_number_of_both(chosen_at(rebate, len(offers) - back)),
        )
        chosen = chosen_at(rebate, len(offers) - back)
    either = [place for _, gives, place in chosen if gives == _EITHER]
    both = [place for _, gives, place in chosen if gives in (_BOTH, _BOTH_LAST)]
    pairs_at = {*both, *either[: pairs - len(both)]}
    places = sorted([place for _, _, place in chosen])
    cost = sum([offers[place].costs[2 if place in pairs_at else 1] for place in places])
    taken = tuple([offers[place].taken(2 if place in pairs_at else 1) for place in places])
    return LeastUsed(cost, taken, Prices(chosen[-1][0] - rebate, rebate))


def _first_that(holds: Callable[[int], bool], most: int, near: int) -> int:
    """The smallest number up to `most` of which something holds, as it does of all larger ones."""
    low, high = -1, most
    step, number = 1, min(near, most - 1)
    while low < number < high:
        if holds(number):
            high = number
            number -= step
        else:
            low = number
            number += step
        if low >= 0 and high < most:
            break
        step *= 2
    return bisect_left(range(high), True, lo=low + 1, key=holds)


def _priced(costs: Sequence[tuple[int, int, int]], rebate: int, stay: int) -> list[_Priced]:
    """The cores by price, of one price those first that give both; from place `stay` on these come last."""
    return sorted(
        [
            (first, _ONE, place)
            if second > rebate
            else (first, _EITHER, place)
            if second == rebate
            else (first + second - rebate, _BOTH if place < stay else _BOTH_LAST, place)
            for first, second, place in costs
        ]
    )


def _cheapest(priced: list[_Priced], homes: Sequence[int], count: int) -> list[_Priced]:
    """The first of each home, then the first of all: `count` of them, the dearest of those last."""
    if not homes:
        return priced[:count]
    firsts: list[_Priced] = []
    rest = []
    seen = {-1}
    for one in priced:
        if homes[one[2]] in seen:
            rest.append(one)
        else:
            seen.add(homes[one[2]])
            firsts.append(one)
    return firsts + rest[: count - len(firsts)]


def _number_of_both(chosen: Sequence[_Priced]) -> int:
    return sum([gives in (_BOTH, _BOTH_LAST) for _, gives, _ in chosen])


def _of_wide_cores(offers: Sequence[Offer], homes: Sequence[int], need: int, count: int) -> LeastUsed:
    """Find the same for wider cores, core by core.

    The cheapest way to each number of cores and of units is kept; ways that can no longer reach the need
    with so many cores are dropped. Of a set that must be touched one of its widest cores is taken, the least
    used of those.
    """
    widest = max([len(offer.cpus) for offer in offers])
    forced: dict[int, int] = {}
    for place in sorted(range(len(homes)), key=lambda place: (-len(offers[place].cpus), offers[place].costs)):
        if homes[place] >= 0:
            forced.setdefault(homes[place], place)
    slack = count * widest - need
    first = list(forced.values())
    reached: dict[tuple[int, int], tuple[int, tuple[tuple[int, int], ...]]] = {(0, 0): (0, ())}
    for place in [*first, *[place for place in range(len(offers)) if place not in first]]:
        known = list(reached.items())
        if place in first:
            reached = {}
        for (opened, units), (cost, taken) in known:
            if opened == count:
                continue
            for extra, more in enumerate(offers[place].costs[1:], start=1):
                way = (opened + 1, units + extra)
                if way[1] > need or way[0] * widest - way[1] > slack:
                    continue
                if way not in reached or cost + more < reached[way][0]:
                    reached[way] = (cost + more, (*taken, (place, extra)))
    cost, ways = reached[count, need]
    uses = sorted([b - a for offer in offers for a, b in zip(offer.costs, offer.costs[1:], strict=False)])
    return LeastUsed(
        cost, tuple([offers[place].taken(extra) for place, extra in ways]), Prices(0, uses[need - 1])
    )
