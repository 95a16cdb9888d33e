"""Set cover: so many groups, chosen from classes of like ones, that together have what is needed.

This is the multi-dimensional multiple-choice form: several amounts are to be covered at once, and of every
class one option is taken. It is solved by depth-first search. A branch is cut off when the largest groups
left cannot cover what is missing, and a state that led to nothing is not searched again. So the steps are
bounded by the number of different sums, and besides by the question's `Effort`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

from kvplace.core.allocator.effort import Effort

Amounts = tuple[int, ...]

_Limit = tuple[int, list[list[int]]]
_Gains = tuple[int, Amounts, list[tuple[int, ...]]]
"""The fewest groups of a class, the most that these have of each amount, what each further group adds."""


class Option(NamedTuple):
    """Some groups that may be taken together."""

    size: int
    """How many groups they are."""
    amounts: Amounts
    """What they have together of everything that is needed."""
    members: tuple[int, ...]


class SetCover:
    """Classes of groups; a selection takes one option of each."""

    def __init__(self, classes: Sequence[Sequence[Option]], effort: Effort) -> None:
        """All options count the same amounts; the sizes of one class's options have no gap."""
        self._classes = classes
        self._effort = effort
        self._limits: list[_Limit | None] = [None] * len(classes)
        self._gains = [_gains(options) for options in classes]
        self._dead: set[tuple[int, int, Amounts]] = set()

    def selections(self, needs: Amounts, count: int) -> Iterator[tuple[int, ...]]:
        """Yield the members of every selection of `count` groups that covers the needs.

        They come in the order of the options; the option of the first class changes last. When the effort is
        spent no more come.
        """
        return self._select(0, count, needs)

    def _select(self, place: int, left: int, missing: Amounts) -> Iterator[tuple[int, ...]]:
        if place == len(self._classes):
            if not left and max(missing) <= 0:
                yield ()
            return
        self._effort.spend(4 + place // 8)
        if self._effort.is_spent:
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
    effort: Effort,
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
    for chosen in SetCover(classes, effort).selections((need, *[missing for _, missing in also]), count):
        yield tuple(sorted(chosen))


def fewest(amounts: Sequence[int], need: int) -> int:
    """How many of the amounts cover a need, the largest first; more than there are when all do not."""
    total = 0
    for count, amount in enumerate(sorted(amounts, reverse=True), start=1):
        total += amount
        if total >= need:
            return count
    return len(amounts) + 1
