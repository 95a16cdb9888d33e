"""Set cover: the groups, chosen from classes of equal ones, that together have enough.

This is the multi-dimensional multiple-choice form: several amounts are to be covered at once, and of every
class one option is taken. It is solved by depth-first search. A branch is cut off when the largest groups
left cannot cover the missing amount, and a state without a solution is not searched again. So the steps are
bounded by the number of different sums, and besides by the question's `SearchBudget`.

The L3 groups of a VM are such a cover: fewest groups, then fewest cores. The widest m of some cores give a
need exactly when, for every t, the threads that cores have beyond t make up for the rest: the sum of
each core's threads beyond t must be at least the need less m times t. So it has one amount for each t.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

from kvplace.core.allocator.layout import L3Part
from kvplace.core.search_budget import SearchBudget

Amounts = tuple[int, ...]

_Limit = tuple[int, list[list[int]]]
_Gains = tuple[int, Amounts, list[tuple[int, ...]]]
"""The fewest groups of a class, their most of each amount, and the gain of each further group."""


class Option(NamedTuple):
    """Some groups that may be taken together."""

    size: int
    """How many groups they are."""
    amounts: Amounts
    """Their sums of all needed amounts."""
    members: tuple[int, ...]


class SetCover:
    """Classes of groups; a selection takes one option of each."""

    def __init__(self, classes: Sequence[Sequence[Option]], budget: SearchBudget) -> None:
        """All options count the same amounts; the sizes of one class's options have no gap."""
        self._classes = classes
        self._budget = budget
        self._limits: list[_Limit | None] = [None] * len(classes)
        self._gains = [_gains(options) for options in classes]
        self._dead: set[tuple[int, int, Amounts]] = set()

    def selections(self, needs: Amounts, count: int) -> Iterator[tuple[int, ...]]:
        """Yield the members of every selection of `count` groups that covers the needs.

        They come in the order of the options; the option of the first class changes last. When the budget is
        spent no more come.
        """
        return self._select(0, count, needs)

    def _select(self, place: int, left: int, missing: Amounts) -> Iterator[tuple[int, ...]]:
        if place == len(self._classes):
            if not left and max(missing) <= 0:
                yield ()
            return
        self._budget.spend(4 + place // 8)
        if self._budget.is_spent:
            return
        fewest_groups, rows = self._limits[place] or self._limit_of(place)
        spare = left - fewest_groups
        if not 0 <= spare < len(rows[0]):
            return
        for row, amount in zip(rows, missing, strict=True):
            if row[spare] < amount:
                return
        if not left:
            yield ()
            return
        state = (place, left, missing)
        if state in self._dead:
            return
        found = False
        for option in self._classes[place]:
            if option.size <= left:
                rest = tuple(map(sub, missing, option.amounts))
                for others in self._select(place + 1, left - option.size, rest):
                    found = True
                    yield option.members + others
        if not found:
            self._dead.add(state)

    def _limit_of(self, place: int) -> _Limit:
        """For the classes from a place on: the fewest groups, and the most that so many or more can have.

        No number of groups has more than the largest amounts that single groups add.
        """
        gains = self._gains[place:]
        rows = []
        for amount in range(len(gains[0][1])):
            added = [step for _, _, steps in gains for step in steps[amount]]
            added.sort(reverse=True)
            rows.append([*accumulate(added, initial=sum([first[amount] for _, first, _ in gains]))])
        limit = self._limits[place] = (sum([count for count, _, _ in gains]), rows)
        return limit


def _gains(options: Sequence[Option]) -> _Gains:
    reach: dict[int, Amounts] = {}
    for option in options:
        known = reach.get(option.size)
        reach[option.size] = tuple(map(max, known, option.amounts)) if known else option.amounts
    counts = sorted(reach)
    steps = [tuple(map(sub, reach[more], reach[fewer])) for fewer, more in pairwise(counts)]
    first = reach[counts[0]]
    return counts[0], first, list(zip(*steps, strict=True)) or [()] * len(first)


def options_of_like(members: Sequence[int], amounts: Amounts, most: int) -> list[Option]:
    """The options of equal groups, each with these amounts: any number of them, most first."""
    return [
        Option(number, tuple([amount * number for amount in amounts]), tuple(members[:number]))
        for number in range(min(most, len(members)), -1, -1)
    ]


def covers(
    units: Sequence[int],
    kinds: Sequence[Hashable],
    need: int,
    count: int,
    budget: SearchBudget,
    *,
    also: Sequence[tuple[Sequence[int], int]] = (),
) -> Iterator[tuple[int, ...]]:
    """Yield every choice of `count` groups that covers a need, as ascending indexes.

    Groups of one kind are interchangeable: of choices that differ in nothing else only the one with the
    lowest indexes comes. Choices with large groups come first. `also` are further amounts by group, with the
    need that each must cover; groups of one kind have equal ones.
    """
    members: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        members.setdefault((units[index], kind), []).append(index)
    amounts = [units, *[of_group for of_group, _ in also]]
    classes = [
        options_of_like(indexes, tuple([of_group[indexes[0]] for of_group in amounts]), count)
        for indexes in sorted(members.values(), key=lambda indexes: -units[indexes[0]])
    ]
    for chosen in SetCover(classes, budget).selections((need, *[missing for _, missing in also]), count):
        yield tuple(sorted(chosen))


def fewest(amounts: Sequence[int], need: int) -> int:
    """How many of the amounts cover a need, the largest first; more than there are when all do not."""
    total = 0
    for count, amount in enumerate(sorted(amounts, reverse=True), start=1):
        total += amount
        if total >= need:
            return count
    return len(amounts) + 1


def threads_beyond(widths: tuple[int, ...]) -> Amounts:
    """For t from 0 on to the widest core: how many units cores have beyond t of them."""
    beyond = []
    units, cores = sum(widths), len(widths)
    for threads in range(1, max(widths) + 2):
        beyond.append(units)
        units -= cores
        cores -= widths.count(threads)
    return tuple(beyond)


def least_cores(reach: Sequence[int], need: int, widest: int) -> int:
    """A lower bound on the cores for a need, by the units that cores have beyond each t, and their sum."""
    cores = max(1, -(-need // widest))
    steps = max(1, len(reach) - 1)
    for threads in range(1, steps):
        cores = max(cores, -((reach[threads] - need) // threads))
    if steps > 1:
        cores = max(cores, -((reach[steps] - steps * need) // (steps * (steps - 1) // 2)))
    return cores


class L3Sets:
    """Searches L3 parts for sets that cover a need."""

    def __init__(self, l3_parts: Sequence[L3Part], need: int, budget: SearchBudget) -> None:
        """The L3 parts must suffice."""
        self._l3_parts = l3_parts
        self._need = need
        self._widest = max([one.widths[0] for one in l3_parts])
        narrowest = min([one.widths[-1] for one in l3_parts])
        self._steps = self._widest if narrowest < self._widest else 1
        """How many t matter, from 0 on."""
        self._beyond = [self._padded(threads_beyond(one.widths)) for one in l3_parts]
        self._cover = SetCover(self._classes(), budget)

    def smallest(self) -> tuple[int, int, tuple[int, ...]]:
        """Find the fewest L3 parts, the fewest cores of so many, and one set of both, by index.

        When the budget is spent the set is still valid, but maybe not the smallest.
        """
        units = [one.units for one in self._l3_parts]
        count = fewest(units, self._need)
        if self._steps == 1:
            return count, -(-self._need // self._widest), self._largest(units, count)
        amounts = [self._counted(beyond) for beyond in self._beyond]
        most = [sum(sorted(of_parts, reverse=True)[:count]) for of_parts in zip(*amounts, strict=True)]
        cores = least_cores(most, self._need, self._widest)
        while not (found := self._some(count, cores)):
            cores += 1
        return count, cores, found

    def chosen(self, count: int, cores: int) -> Iterator[tuple[int, ...]]:
        """Yield the sets of `count` L3 parts that cover the need with so many cores."""
        needs = [self._need - cores * threads for threads in range(self._steps)]
        return self._cover.selections(self._counted(needs), count)

    def _some(self, count: int, cores: int) -> tuple[int, ...]:
        """A set of `count` L3 parts that covers the need with so many cores; empty if none is found."""
        for of_parts in zip(*self._beyond, strict=True):
            found = self._largest(of_parts, count)
            if self._fit(found, cores):
                return found
        return next(self.chosen(count, cores), ())

    def _largest(self, amounts: Sequence[int], count: int) -> tuple[int, ...]:
        """The L3 parts that have most of something."""
        ordered = sorted(range(len(self._l3_parts)), key=lambda index: -amounts[index])
        return tuple(ordered[:count])

    def _fit(self, chosen: Sequence[int], cores: int) -> bool:
        """Whether so many cores of the chosen L3 parts cover the need."""
        if cores * self._widest < self._need:
            return False
        for threads, of_parts in enumerate(zip(*[self._beyond[index] for index in chosen], strict=True)):
            if sum(of_parts) + cores * threads < self._need:
                return False
        return True

    def _padded(self, beyond: Amounts) -> Amounts:
        return (*beyond, *(0,) * (self._steps - len(beyond)))[: self._steps]

    def _counted(self, amounts: Sequence[int]) -> Amounts:
        """The amounts that are checked; their sum cuts off further branches."""
        return (*amounts, sum(amounts)) if len(amounts) > 1 else tuple(amounts)

    def _classes(self) -> list[list[Option]]:
        """L3 parts that are alike, the tightest first."""
        classes: dict[Hashable, list[int]] = {}
        for index, one in enumerate(self._l3_parts):
            classes.setdefault(one.widths, []).append(index)
        ordered = sorted(classes.values(), key=lambda indexes: -self._l3_parts[indexes[0]].units)
        return [
            options_of_like(indexes, self._counted(self._beyond[indexes[0]]), len(indexes))
            for indexes in reversed(ordered)
        ]
