"""The sets of bins (L3 groups, or parts of them) that cover a need: fewest bins, then fewest cores.

The largest m of some cores give a need just when for every t their threads beyond t make up for the rest:
the sum of what each core has more than t must be the need less m times t. So a set is good when it covers
several amounts at once, one for each t. Where every one of some sets of CPUs must give a CPU, its widest core
is opened first; that core then counts t threads more for each t.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, le

from kvplace.core.allocator.covering import Amounts, Cover, Option, like_groups
from kvplace.core.allocator.layout import Bin
from kvplace.core.allocator.supply import fewest

_MOST_UNPRUNED = 16
"""Ways to take as many bins of one place that are kept without asking whether others are better."""
_MOST_WORTHY = 8
"""Ways to take as many bins of one place that are kept for what they are worth alone."""


@lru_cache(maxsize=1 << 14)
def threads_beyond(widths: tuple[int, ...]) -> Amounts:
    """For t from 0 on to the widest core: how many units cores have beyond t of them."""
    return tuple([sum([width - t for width in widths if width > t]) for t in range(max(widths) + 1)])


def least_cores(reach: Sequence[int], need: int, widest: int, forced: int = 0) -> int:
    """A number of cores that a need takes at least, by what bins have beyond each t, and that in sum.

    `forced` of the cores count t more for each t.
    """
    cores = max(1, forced, -(-need // widest))
    steps = max(1, len(reach) - 1)
    for threads in range(1, steps):
        cores = max(cores, forced - (reach[threads] - need) // threads)
    if steps > 1:
        cores = max(cores, forced - (reach[steps] - steps * need) // (steps * (steps - 1) // 2))
    return cores


def most_worth(bins: Sequence[Bin], worths: Sequence[int], need: int, size: tuple[int, int]) -> int:
    """What so many bins can be worth at most, of which so many cores cover a need.

    A set that covers it has a certain number of units, and of threads beyond each t. Whatever these are
    priced at, it is worth no more with them than the bins that are then worth most; the price of what it must
    have is taken off again.
    """
    count, cores = size
    most = sum(sorted(worths, reverse=True)[:count])
    beyond = [threads_beyond(one.widths) for one in bins]
    for threads in range(min(map(len, beyond)) - 1):
        price, largest = 1, max(worths)
        while price <= largest:
            paid = [worth + price * amounts[threads] for worth, amounts in zip(worths, beyond, strict=True)]
            less = sum(sorted(paid, reverse=True)[:count]) - price * (need - cores * threads)
            if less >= most:
                break
            most = less
            price *= 2
    return most


class BinSets:
    """Bins of which sets are sought, to cover a need, with a unit at least of each of `touched`."""

    def __init__(self, bins: Sequence[Bin], need: int, touched: Sequence[int] = ()) -> None:
        """The bins must suffice, and every set of `touched` have a unit in one of them."""
        self._bins = bins
        self._need = need
        self._forced = len(touched)
        self._widest = max([one.widths[0] for one in bins])
        narrowest = min([one.widths[-1] for one in bins])
        self._steps = self._widest + 1 if touched else self._widest if narrowest < self._widest else 1
        """How many t matter: from 0 on, and with cores that are opened first up to all their threads."""
        self._beyond = [self._padded(threads_beyond(one.widths)) for one in bins]
        self._opened = [_widest_in(one, touched) for one in bins] if touched else [() for _ in bins]
        """The widest core of each bin in each of `touched`."""
        self._covers: dict[tuple[int, ...], Cover] = {}

    def smallest(self) -> tuple[int, int, tuple[int, ...]]:
        """The fewest bins, the fewest cores of so many, and one set of both, by index."""
        units = [one.units for one in self._bins]
        least = fewest(units, self._need)
        if self._forced:
            least = max(least, -(-self._forced // max([sum(map(bool, widths)) for widths in self._opened])))
        elif self._steps == 1:
            return least, -(-self._need // self._widest), self._largest(units, least)
        amounts = [self._counted(beyond) for beyond in self._beyond]
        opened = [
            sum([min(max(widths), threads) for widths in zip(*self._opened, strict=True)])
            for threads in range(self._steps)
        ]
        for count in range(least, len(self._bins) + 1):
            if self._forced and not self._some(count, self._need):
                continue
            most = [sum(sorted(of_bins, reverse=True)[:count]) for of_bins in zip(*amounts, strict=True)]
            reach = [*map(add, most, self._counted(opened))]
            cores = least_cores(reach, self._need, self._widest, self._forced)
            while not (found := self._some(count, cores)):
                cores += 1
            return count, cores, found
        raise AssertionError("the bins do not suffice")

    def chosen(
        self, count: int, cores: int, worths: Sequence[int] = (), least: int = 0
    ) -> Iterator[tuple[int, ...]]:
        """Yield the sets of `count` bins of which so many cores cover the need, and that are worth so much.

        With `worths`, by bin, the first is worth most, if nothing else forbids that; it comes twice.
        """
        if worths:
            best = self._largest(worths, count)
            if sum([worths[index] for index in best]) >= least and self._fit(best, cores):
                yield best
        needs = [self._need - (cores - self._forced) * threads for threads in range(self._steps)]
        yield from self._cover(worths).selections(self._counted(needs, least, worths), count)

    def _cover(self, worths: Sequence[int]) -> Cover:
        key = tuple(worths)
        if key not in self._covers:
            self._covers[key] = Cover(self._places(worths) if self._forced else self._classes(worths))
        return self._covers[key]

    def _some(self, count: int, cores: int) -> tuple[int, ...]:
        """A set of `count` bins of which so many cores cover the need; empty if there is none."""
        for of_bins in zip(*self._beyond, strict=True):
            found = self._largest(of_bins, count)
            if self._fit(found, cores):
                return found
        return next(self.chosen(count, cores), ())

    def _largest(self, amounts: Sequence[int], count: int) -> tuple[int, ...]:
        """The bins that have most of something; where sets must be touched first the one of each."""
        ordered = sorted(range(len(self._bins)), key=lambda index: -amounts[index])
        if not self._forced:
            return tuple(ordered[:count])
        chosen: list[int] = []
        missing = set(range(self._forced))
        for index in ordered:
            if any(self._opened[index][home] for home in missing):
                chosen.append(index)
                missing -= {home for home, width in enumerate(self._opened[index]) if width}
        chosen += [index for index in ordered if index not in chosen]
        return tuple(chosen[:count])

    def _fit(self, chosen: Sequence[int], cores: int) -> bool:
        """Whether so many cores of the chosen bins cover the need and touch what must be touched."""
        opened = [max(widths) for widths in zip(*[self._opened[index] for index in chosen], strict=True)]
        if opened and not all(opened):
            return False
        if cores * self._widest < self._need:
            return False
        for threads, of_bins in enumerate(zip(*[self._beyond[index] for index in chosen], strict=True)):
            have = sum(of_bins) + sum([min(width, threads) for width in opened])
            if have + (cores - self._forced) * threads < self._need:
                return False
        return True

    def _padded(self, beyond: Amounts) -> Amounts:
        return (*beyond, *(0,) * (self._steps - len(beyond)))[: self._steps]

    def _counted(self, amounts: Sequence[int], worth: int = 0, worths: Sequence[int] = ()) -> Amounts:
        """The amounts that are looked at; their sum prunes what none of them does."""
        together = (sum(amounts),) if len(amounts) > 1 else ()
        return (*amounts, *together, worth) if worths else (*amounts, *together)

    def _classes(self, worths: Sequence[int]) -> list[list[Option]]:
        """Bins that are alike, the tightest first, or those that are worth most."""
        worth_of = worths or [0] * len(self._bins)
        classes: dict[Hashable, list[int]] = {}
        for index, one in enumerate(self._bins):
            classes.setdefault((one.widths, worth_of[index]), []).append(index)
        ordered = list(classes.values())
        if worths:
            ordered.sort(key=lambda indexes: -worths[indexes[0]])
        else:
            ordered.sort(key=lambda indexes: -self._bins[indexes[0]].units)
            ordered.reverse()
        return [
            like_groups(
                indexes, self._counted(self._beyond[indexes[0]], worth_of[indexes[0]], worths), len(indexes)
            )
            for indexes in ordered
        ]

    def _places(self, worths: Sequence[int]) -> list[list[Option]]:
        """The bins by the sets they touch: what of each place can be taken so that these are all touched."""
        places = []
        for members, homes in _connected(self._opened):
            reaches = [
                (
                    self._beyond[index],
                    tuple([self._opened[index][home] for home in homes]),
                    worths[index] if worths else 0,
                )
                for index in members
            ]
            places.append(
                [
                    Option(
                        len(way.members),
                        self._counted(way.amounts, way.worth, worths),
                        tuple([members[place] for place in way.members]),
                    )
                    for way in _ways(tuple(reaches))
                ]
            )
        return places


_Reach = tuple[Amounts, Amounts, int]
"""Threads beyond each t, the widest core of each set that must be touched, worth."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to take bins of one place so that every set there is touched."""

    amounts: Amounts
    """Threads beyond each t, with those of the cores that are opened first."""
    worth: int
    members: tuple[int, ...]


@lru_cache(maxsize=1 << 12)
def _ways(reaches: tuple[_Reach, ...]) -> tuple[_Way, ...]:
    """The ways to take some of the bins of a place; of any that is worse in everything another is there."""
    beyond, widest, _ = reaches[0]
    found: list[dict[_Reach, tuple[int, ...]]] = [{((0,) * len(beyond), (0,) * len(widest), 0): ()}]
    for place, reach in enumerate(reaches):
        found.append({})
        for count in range(place, -1, -1):
            for before, members in found[count].items():
                found[count + 1].setdefault(_added(before, reach), (*members, place))
        found = [_pruned(same) if len(same) > _MOST_UNPRUNED else same for same in found]
    ways = []
    for same in found:
        touching: dict[_Reach, tuple[int, ...]] = {}
        for (beyond, widest, worth), members in same.items():
            if all(widest):
                opened = [sum([min(width, t) for width in widest]) for t in range(len(beyond))]
                touching.setdefault((tuple(map(add, beyond, opened)), (), worth), members)
        ways += [_Way(amounts, worth, members) for (amounts, _, worth), members in _pruned(touching).items()]
    return tuple(ways)


def _added(one: _Reach, other: _Reach) -> _Reach:
    return (tuple(map(add, one[0], other[0])), tuple(map(max, one[1], other[1])), one[2] + other[2])


def _pruned(ways: dict[_Reach, tuple[int, ...]]) -> dict[_Reach, tuple[int, ...]]:
    """Those that no other one is as good as in everything; those that are worth most come first.

    Of many the ones are left out that another is as good as in everything but worth.
    """
    ordered = sorted(ways, key=lambda reach: (reach[2], reach), reverse=True)
    kept = _unsurpassed(ordered)
    if len(kept) > _MOST_WORTHY:
        needed = set(_unsurpassed(sorted(kept, reverse=True)))
        kept = [reach for place, reach in enumerate(kept) if place < _MOST_WORTHY or reach in needed]
    return {reach: ways[reach] for reach in kept}


def _unsurpassed(ordered: Iterable[_Reach]) -> list[_Reach]:
    """Those that no earlier one is as good as, but for worth."""
    kept: list[_Reach] = []
    flat: list[Amounts] = []
    for reach in ordered:
        amounts = reach[0] + reach[1]
        if not any(all(map(le, amounts, other)) for other in flat):
            kept.append(reach)
            flat.append(amounts)
    return kept


def _widest_in(one: Bin, touched: Sequence[int]) -> Amounts:
    inside = 0
    for core, _ in one.cores:
        inside |= core
    return tuple(
        [max([width for core, width in one.cores if core & cpus]) if inside & cpus else 0 for cpus in touched]
    )


def _connected(widest: Sequence[Sequence[int]]) -> list[tuple[list[int], list[int]]]:
    """The bins, by index, that touch a set in common, directly or by others, and the sets that they touch."""
    places: list[tuple[list[int], set[int]]] = []
    for index, widths in enumerate(widest):
        members, homes = [index], {home for home, width in enumerate(widths) if width}
        apart = []
        for place in places:
            if place[1] & homes:
                members = [*place[0], *members]
                homes |= place[1]
            else:
                apart.append(place)
        places = [*apart, (members, homes)]
    return [(members, sorted(homes)) for members, homes in places]
