"""The sets of L3 groups that cover a need: fewest groups, then fewest cores.

The widest m of some cores give a need exactly when, for every t, the threads that cores have beyond t make up
for the rest: the sum of what each core has more than t must be at least the need less m times t. So this is a
set cover with one amount for each t. Where some sets of CPUs must give one CPU each, the widest core of each
is opened first; such a core then counts t threads more for each t.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import add, le

from kvplace.core.allocator.effort import Effort
from kvplace.core.allocator.layout import L3Part
from kvplace.core.allocator.set_cover import Amounts, Option, SetCover, fewest, options_of_like

_MOST_UNPRUNED = 16
"""Ways to take as many L3 parts of one component that are kept unpruned."""
_MOST_WAYS = 24
"""Ways to take as many L3 parts of one component that are kept at all, the largest first."""


@lru_cache(maxsize=1 << 14)
def threads_beyond(widths: tuple[int, ...]) -> Amounts:
    """For t from 0 on to the widest core: how many units cores have beyond t of them."""
    return tuple([sum([width - t for width in widths if width > t]) for t in range(max(widths) + 1)])


def least_cores(reach: Sequence[int], need: int, widest: int, forced: int = 0) -> int:
    """A lower bound on the cores for a need, by the units that cores have beyond each t, and their sum.

    `forced` of the cores count t more for each t.
    """
    cores = max(1, forced, -(-need // widest))
    steps = max(1, len(reach) - 1)
    for threads in range(1, steps):
        cores = max(cores, forced - (reach[threads] - need) // threads)
    if steps > 1:
        cores = max(cores, forced - (reach[steps] - steps * need) // (steps * (steps - 1) // 2))
    return cores


class L3Sets:
    """Searches L3 parts for sets that cover a need, with a unit of each of the `required` sets of CPUs."""

    def __init__(
        self, l3_parts: Sequence[L3Part], need: int, effort: Effort, required: Sequence[int] = ()
    ) -> None:
        """The L3 parts must suffice, and each of `required` have a unit in one of them."""
        self._l3_parts = l3_parts
        self._need = need
        self._forced = len(required)
        self._widest = max([one.widths[0] for one in l3_parts])
        narrowest = min([one.widths[-1] for one in l3_parts])
        self._steps = self._widest + 1 if required else self._widest if narrowest < self._widest else 1
        """How many t matter: from 0 on, and with cores that are opened first up to all their threads."""
        self._beyond = [self._padded(threads_beyond(one.widths)) for one in l3_parts]
        self._opened = [_widest_in(one, required) for one in l3_parts] if required else [() for _ in l3_parts]
        """The width of the widest core of each L3 part in each of `required`."""
        classes = self._components(effort) if required else self._classes()
        self._cover = SetCover(classes, effort)

    def smallest(self) -> tuple[int, int, tuple[int, ...]]:
        """Find the fewest L3 parts, the fewest cores of so many, and one set of both, by index.

        When the effort is spent the set is still valid, but maybe not the smallest.
        """
        units = [one.units for one in self._l3_parts]
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
        for count in range(least, len(self._l3_parts) + 1):
            if self._forced and not self._some(count, self._need):
                continue
            most = [sum(sorted(of_parts, reverse=True)[:count]) for of_parts in zip(*amounts, strict=True)]
            reach = [*map(add, most, self._counted(opened))]
            cores = least_cores(reach, self._need, self._widest, self._forced)
            while not (found := self._some(count, cores)):
                cores += 1
            return count, cores, found
        raise AssertionError("the L3 parts do not suffice")

    def chosen(self, count: int, cores: int) -> Iterator[tuple[int, ...]]:
        """Yield the sets of `count` L3 parts of which so many cores cover the need."""
        needs = [self._need - (cores - self._forced) * threads for threads in range(self._steps)]
        return self._cover.selections(self._counted(needs), count)

    def _some(self, count: int, cores: int) -> tuple[int, ...]:
        """A set of `count` L3 parts of which so many cores cover the need; empty if none is found."""
        for of_parts in zip(*self._beyond, strict=True):
            found = self._largest(of_parts, count)
            if self._fit(found, cores):
                return found
        return next(self.chosen(count, cores), ())

    def _largest(self, amounts: Sequence[int], count: int) -> tuple[int, ...]:
        """The L3 parts that have most of something; first those that have something of what is required."""
        ordered = sorted(range(len(self._l3_parts)), key=lambda index: -amounts[index])
        if not self._forced:
            return tuple(ordered[:count])
        chosen: list[int] = []
        missing = set(range(self._forced))
        for index in ordered:
            if any(self._opened[index][place] for place in missing):
                chosen.append(index)
                missing -= {place for place, width in enumerate(self._opened[index]) if width}
        chosen += [index for index in ordered if index not in chosen]
        return tuple(chosen[:count])

    def _fit(self, chosen: Sequence[int], cores: int) -> bool:
        """Whether so many cores of the chosen L3 parts cover the need and all that is required."""
        opened = [max(widths) for widths in zip(*[self._opened[index] for index in chosen], strict=True)]
        if opened and not all(opened):
            return False
        if cores * self._widest < self._need:
            return False
        for threads, of_parts in enumerate(zip(*[self._beyond[index] for index in chosen], strict=True)):
            have = sum(of_parts) + sum([min(width, threads) for width in opened])
            if have + (cores - self._forced) * threads < self._need:
                return False
        return True

    def _padded(self, beyond: Amounts) -> Amounts:
        return (*beyond, *(0,) * (self._steps - len(beyond)))[: self._steps]

    def _counted(self, amounts: Sequence[int]) -> Amounts:
        """The amounts that are looked at; their sum prunes what none of them does."""
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

    def _components(self, effort: Effort) -> list[list[Option]]:
        """The connected components of L3 parts and what is required, and what can be taken of each."""
        components = []
        for members, places in _connected(self._opened):
            effort.spend(2 * len(members) ** 3)  # Counted here, since answers of `_ways` are cached.
            reaches = [
                (self._beyond[index], tuple([self._opened[index][place] for place in places]))
                for index in members
            ]
            components.append(
                [
                    Option(len(chosen), self._counted(amounts), tuple([members[place] for place in chosen]))
                    for amounts, chosen in _ways(tuple(reaches))
                ]
            )
        return components


_Reach = tuple[Amounts, Amounts]
"""Threads beyond each t, and the widest core in each of the sets that are required."""


@lru_cache(maxsize=1 << 12)
def _ways(reaches: tuple[_Reach, ...]) -> tuple[tuple[Amounts, tuple[int, ...]], ...]:
    """The Pareto-optimal ways to take L3 parts of a component so that they have all that is required there.

    Each is given by its threads beyond each t, cores that are opened first included, and its members.
    """
    beyond, widest = reaches[0]
    found: list[dict[_Reach, tuple[int, ...]]] = [{((0,) * len(beyond), (0,) * len(widest)): ()}]
    for place, reach in enumerate(reaches):
        found.append({})
        for count in range(place, -1, -1):
            for before, members in found[count].items():
                found[count + 1].setdefault(_added(before, reach), (*members, place))
        found = [_pareto(same) if len(same) > _MOST_UNPRUNED else same for same in found]
    ways: list[tuple[Amounts, tuple[int, ...]]] = []
    for same in found:
        complete: dict[_Reach, tuple[int, ...]] = {}
        for (beyond, widest), members in same.items():
            if all(widest):
                opened = [sum([min(width, t) for width in widest]) for t in range(len(beyond))]
                complete.setdefault((tuple(map(add, beyond, opened)), ()), members)
        ways += [(amounts, members) for (amounts, _), members in _pareto(complete).items()]
    return tuple(ways)


def _added(one: _Reach, other: _Reach) -> _Reach:
    return (tuple(map(add, one[0], other[0])), tuple(map(max, one[1], other[1])))


def _pareto(ways: dict[_Reach, tuple[int, ...]]) -> dict[_Reach, tuple[int, ...]]:
    """Those that no other one is as good as in everything, the ones with most units first, up to a bound."""
    kept: dict[_Reach, tuple[int, ...]] = {}
    flat: list[Amounts] = []
    for reach in sorted(ways, key=_most_required_first, reverse=True):
        amounts = reach[0] + reach[1]
        if not any(all(map(le, amounts, other)) for other in flat):
            kept[reach] = ways[reach]
            flat.append(amounts)
            if len(kept) == _MOST_WAYS:
                break
    return kept


def _most_required_first(reach: _Reach) -> tuple[int, _Reach]:
    return (sum(map(bool, reach[1])), reach)


def _widest_in(one: L3Part, required: Sequence[int]) -> Amounts:
    inside = 0
    for core, _ in one.cores:
        inside |= core
    return tuple(
        [
            max([width for core, width in one.cores if core & cpus]) if inside & cpus else 0
            for cpus in required
        ]
    )


def _connected(widest: Iterable[Sequence[int]]) -> list[tuple[list[int], list[int]]]:
    """The connected components of L3 parts and required sets, both by index."""
    components: list[tuple[list[int], set[int]]] = []
    for index, widths in enumerate(widest):
        members, places = [index], {place for place, width in enumerate(widths) if width}
        apart = []
        for component in components:
            if component[1] & places:
                members = [*component[0], *members]
                places |= component[1]
            else:
                apart.append(component)
        components = [*apart, (members, places)]
    return [(members, sorted(places)) for members, places in components]
