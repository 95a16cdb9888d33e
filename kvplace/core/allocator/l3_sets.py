"""The sets of L3 groups that cover a need: fewest groups, then fewest cores.

The widest m of some cores give a need exactly when, for every t, the threads that cores have beyond t make up
for the rest: the sum of what each core has more than t must be at least the need less m times t. So this is a
set cover with one amount for each t.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache

from kvplace.core.allocator.effort import Effort
from kvplace.core.allocator.layout import L3Part
from kvplace.core.allocator.set_cover import Amounts, Option, SetCover, fewest, options_of_like


@lru_cache(maxsize=1 << 14)
def threads_beyond(widths: tuple[int, ...]) -> Amounts:
    """For t from 0 on to the widest core: how many units cores have beyond t of them."""
    return tuple([sum([width - t for width in widths if width > t]) for t in range(max(widths) + 1)])


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

    def __init__(self, l3_parts: Sequence[L3Part], need: int, effort: Effort) -> None:
        """The L3 parts must suffice."""
        self._l3_parts = l3_parts
        self._need = need
        self._widest = max([one.widths[0] for one in l3_parts])
        narrowest = min([one.widths[-1] for one in l3_parts])
        self._steps = self._widest if narrowest < self._widest else 1
        """How many t matter, from 0 on."""
        self._beyond = [self._padded(threads_beyond(one.widths)) for one in l3_parts]
        self._cover = SetCover(self._classes(), effort)

    def smallest(self) -> tuple[int, int, tuple[int, ...]]:
        """Find the fewest L3 parts, the fewest cores of so many, and one set of both, by index.

        When the effort is spent the set is still valid, but maybe not the smallest.
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
        """The amounts that are checked; their sum prunes what none of them does."""
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
