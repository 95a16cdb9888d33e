"""Covers: so many groups, by one of several options of each choice, that together have what is needed.

All amounts are counted at once. A way is given up as soon as the largest that is left cannot make up for what
is missing, and a state that led to nothing is never searched again: so the effort is bounded by the number of
different sums, not by that of the ways.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

Amounts = tuple[int, ...]

_Limit = tuple[int, list[list[int]]]
_Gains = tuple[int, Amounts, list[tuple[int, ...]]]
"""The fewest groups of a choice, the most that these have of each amount, what each group more adds to it."""


class Option(NamedTuple):
    """Some groups that may be taken together."""

    size: int
    """How many groups they are."""
    amounts: Amounts
    """What they have together of everything that is needed."""
    members: tuple[int, ...]


class Cover:
    """Choices of which each must be made, by one of its options."""

    def __init__(self, choices: Sequence[Sequence[Option]]) -> None:
        """Every option counts the same amounts; of one choice the counts of groups have no gap."""
        self._choices = choices
        self._limits: list[_Limit | None] = [None] * len(choices)
        self._gains = [_gains(options) for options in choices]
        self._dead: set[tuple[int, int, Amounts]] = set()

    def selections(self, needs: Amounts, count: int) -> Iterator[tuple[int, ...]]:
        """Yield the members of every selection of `count` groups that covers the needs.

        They come in the order of the options; the option of the first choice changes last.
        """
        return self._select(0, count, needs)

    def _select(self, place: int, left: int, missing: Amounts) -> Iterator[tuple[int, ...]]:
        if place == len(self._choices):
            if not left and max(missing) <= 0:
                yield ()
            return
        fewest, rows = self._limits[place] or self._limit_of(place)
        spare = left - fewest
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
        for option in self._choices[place]:
            if option.size <= left:
                rest = tuple(map(sub, missing, option.amounts))
                for others in self._select(place + 1, left - option.size, rest):
                    found = True
                    yield option.members + others
        if not found:
            self._dead.add(state)

    def _limit_of(self, place: int) -> _Limit:
        """For the choices from a place on: the fewest groups, and what these, one more and so on can have.

        No number of groups has more than the largest amounts that single groups add.
        """
        gains = self._gains[place:]
        rows = []
        for amount in range(len(gains[0][1])):
            added = [step for _, _, steps in gains for step in steps[amount]]
            added.sort(reverse=True)
            rows.append([*accumulate(added, initial=sum([first[amount] for _, first, _ in gains]))])
        limit = self._limits[place] = (sum([fewest for fewest, _, _ in gains]), rows)
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


def like_groups(members: Sequence[int], amounts: Amounts, most: int) -> list[Option]:
    """The options of groups that are all alike, each with these amounts: any number of them, most first."""
    return [
        Option(number, tuple([amount * number for amount in amounts]), tuple(members[:number]))
        for number in range(min(most, len(members)), -1, -1)
    ]


def covers(
    units: Sequence[int],
    kinds: Sequence[Hashable],
    need: int,
    count: int,
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
    choices = [
        like_groups(indexes, tuple([of_group[indexes[0]] for of_group in amounts]), count)
        for indexes in sorted(members.values(), key=lambda indexes: -units[indexes[0]])
    ]
    for chosen in Cover(choices).selections((need, *[missing for _, missing in also]), count):
        yield tuple(sorted(chosen))
