"""Which CPUs of given cores others use least, where a VM shares its CPUs.

The number of cores is fixed first, since fewer cores come before less used ones. With it a machine of two
threads a core also fixes how many cores give both; that leaves a choice which prices solve exactly. Wider
cores, on which a need can be made up in many ways, take a table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate

from kvplace.core.allocator.supply import fewest
from kvplace.core.cpuset import cpus_of, mask_of

CoreUse = tuple[int, int]
"""The available CPUs of a core, and those of them that are taken."""


def least_used(cores: Sequence[tuple[int, int]], need: int, uses: Mapping[int, int]) -> tuple[CoreUse, ...]:
    """Cover a need with the fewest cores, of those with the CPUs that others use least."""
    widths = sorted([width for _, width in cores], reverse=True)
    count = fewest(widths, need)
    offers = [
        _Offer(core, width, sorted(cpus_of(core), key=lambda cpu: uses.get(cpu, 0)), uses)
        for core, width in cores
    ]
    if widths[0] <= 2:
        return _of_pairs(offers, need, count)
    return _of_wide_cores(offers, need, count, widths[0])


class _Offer:
    """One core, and what others use of it: of its first CPU, of the first two and so on."""

    def __init__(self, core: int, width: int, ordered: Sequence[int], uses: Mapping[int, int]) -> None:
        self.core = core
        self.cpus = ordered[:width]
        """The CPUs that it can give, the least used first."""
        self.costs = [0, *accumulate([uses.get(cpu, 0) for cpu in self.cpus])]

    def taken(self, units: int) -> CoreUse:
        """Take so many of its CPUs."""
        return (self.core, mask_of(self.cpus[:units]))


def _of_pairs(offers: Sequence[_Offer], need: int, count: int) -> tuple[CoreUse, ...]:
    """Choose `count` cores of one or two CPUs; the need says how many of them give both.

    A rebate on second CPUs decides how many cores give both: every core takes what is cheaper after it, and
    the cheapest are chosen. With the smallest rebate that makes the right number possible no other choice
    is cheaper; cores that cost the same either way then make up the exact number.
    """
    pairs = need - count
    most = max([offer.costs[-1] for offer in offers])
    rebate = bisect_left(range(most + 1), pairs, key=lambda one: _pairs_among(_priced(offers, one)[:count]))
    priced = _priced(offers, rebate)
    chosen = priced[:count]
    last = chosen[-1][0]
    others = [one for one in priced[count:] if one[0] == last]
    both = [one for one in chosen if one[1] is _Gives.BOTH]
    while len(both) > pairs:  # those of the last price make way for cores that may give one
        chosen.remove(both.pop())
        chosen.append(others.pop())
    either = [one for one in chosen if one[1] is _Gives.EITHER]
    pairs_at = {place for _, _, place in (*both, *either[: pairs - len(both)])}
    places = sorted([place for _, _, place in chosen])
    return tuple([offers[place].taken(2 if place in pairs_at else 1) for place in places])


class _Gives(IntEnum):
    """How many CPUs a core gives at a rebate on the second."""

    BOTH = 0
    EITHER = 1
    ONE = 2


_Priced = tuple[int, _Gives, int]
"""The price of a core, how many CPUs it gives for that, and its place."""


def _priced(offers: Sequence[_Offer], rebate: int) -> list[_Priced]:
    """The cores by price, of one price those first that give both."""
    found = []
    for place, offer in enumerate(offers):
        first, second = offer.costs[1], offer.costs[-1] - offer.costs[1]
        if len(offer.cpus) == 1 or second > rebate:
            found.append((first, _Gives.ONE, place))
        else:
            found.append((first + second - rebate, _Gives.EITHER if second == rebate else _Gives.BOTH, place))
    found.sort()
    return found


def _pairs_among(chosen: Sequence[_Priced]) -> int:
    return sum([gives is not _Gives.ONE for _, gives, _ in chosen])


def _of_wide_cores(offers: Sequence[_Offer], need: int, count: int, widest: int) -> tuple[CoreUse, ...]:
    """Find the same for wider cores, core by core.

    The cheapest way to each number of cores and of units is kept; ways that can no longer reach the need
    with so many cores are dropped.
    """
    slack = count * widest - need
    reached: dict[tuple[int, int], tuple[int, tuple[tuple[int, int], ...]]] = {(0, 0): (0, ())}
    for place, offer in enumerate(offers):
        for (opened, units), (cost, taken) in list(reached.items()):
            if opened == count:
                continue
            for extra, more in enumerate(offer.costs[1:], start=1):
                way = (opened + 1, units + extra)
                if way[1] > need or way[0] * widest - way[1] > slack:
                    continue
                if way not in reached or cost + more < reached[way][0]:
                    reached[way] = (cost + more, (*taken, (place, extra)))
    return tuple(offers[place].taken(extra) for place, extra in reached[count, need][1])
