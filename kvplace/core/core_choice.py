"""Which cores of a region serve a need: fewest L3 groups, then fewest cores, both exact.

A region is given as bins, one for each L3 group. Among choices that are equal so far the one is taken
that destroys least for later VMs, or for a sharing VM the one whose CPUs are least used.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvplace.core.cpuset import cpus_of, lowest
from kvplace.core.layout import Bin
from kvplace.core.look_ahead import slots_lost
from kvplace.core.supply import fewest

MOST_CHOICES = 20_000
"""Choices looked at before a search settles for the best so far; reached on contrived machines only."""
_MOST_TIES = 256
"""Choices of equal rank looked at for the one with the least damage."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a VM gets of one core."""

    core: int
    """The core's available CPUs."""
    cpus: int
    """Those of them that the VM names, one for each unit."""


@dataclass(frozen=True, slots=True)
class CoreChoice:
    """Cores that serve a need."""

    l3_groups: int
    cores: int
    damage: int
    """CPUs of later VMs' slots that the choice destroys in L3 groups; uses by others for a sharing VM."""
    taken: tuple[Taken, ...]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Smaller is better."""
        return (self.l3_groups, self.cores, self.damage)


def choose_cores(
    bins: Sequence[Bin],
    need: int,
    *,
    uses: Mapping[int, int] | None = None,
    touched: Sequence[int] = (),
) -> CoreChoice | None:
    """Serve a need from bins, or None when they hold too little.

    `uses` counts the VMs that name each CPU already: given for a sharing VM, not for an exclusive one.
    Every set of CPUs in `touched` must give at least one unit, for which the need must suffice.
    """
    if not need:
        return CoreChoice(0, 0, 0, ())
    if len(touched) > 1:
        return _touching(bins, need, touched, uses)
    full = [one for one in bins if one.units]
    units = [one.units for one in full]
    count = fewest(units, need)
    if count > len(full):
        return None
    if count == len(full):
        return _choice(full, need, uses)
    least = _fewest_cores(full, need)
    best: CoreChoice | None = None
    kinds: Sequence[Hashable] = [one.widths for one in full] if uses is None else range(len(full))
    for number, chosen in enumerate(covers(units, kinds, need, count)):
        choice = _choice([full[index] for index in chosen], need, uses)
        if best is None or choice.rank < best.rank:
            best = choice
        if number >= (_MOST_TIES if best.cores == least else MOST_CHOICES):
            break
    return best


def covers(
    units: Sequence[int], kinds: Sequence[Hashable], need: int, count: int
) -> Iterator[tuple[int, ...]]:
    """Yield every choice of `count` groups that covers a need, as ascending indexes.

    Groups of one kind are interchangeable: of choices that differ in nothing else only the one with the
    lowest indexes comes. Choices with large groups come first.
    """
    members: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        members.setdefault((units[index], kind), []).append(index)
    classes = sorted(members.values(), key=lambda indexes: -units[indexes[0]])
    # The most that `k` groups of the classes from `place` on can give.
    most = [
        [0, *accumulate(units[index] for one in classes[place:] for index in one)]
        for place in range(len(classes) + 1)
    ]

    def choose(place: int, missing: int, left: int) -> Iterator[tuple[int, ...]]:
        if not left:
            if missing <= 0:
                yield ()
            return
        if left >= len(most[place]) or most[place][left] < missing:
            return
        indexes = classes[place]
        for number in range(min(left, len(indexes)), -1, -1):
            for rest in choose(place + 1, missing - number * units[indexes[0]], left - number):
                yield (*indexes[:number], *rest)

    for chosen in choose(0, need, count):
        yield tuple(sorted(chosen))


def _choice(bins: Sequence[Bin], need: int, uses: Mapping[int, int] | None) -> CoreChoice:
    # Small groups are used up first, so that what is left over stays together in a large one.
    ordered = sorted(bins, key=lambda one: one.units)
    taken = pick_cores([core for one in ordered for core in one.cores], need, uses)
    if uses is not None:
        damage = sum(uses.get(cpu, 0) for one in taken for cpu in cpus_of(one.cpus))
    else:
        over = sum(one.units for one in ordered) - need
        damage = sum(slots_lost(one.units, 0) for one in ordered[:-1])
        damage += slots_lost(ordered[-1].units, over)
    return CoreChoice(len(bins), len(taken), damage, taken)


def pick_cores(
    cores: Sequence[tuple[int, int]], need: int, uses: Mapping[int, int] | None = None
) -> tuple[Taken, ...]:
    """Cover a need with the fewest cores, the last one as tight as possible; they must suffice."""
    if uses:
        return _least_used(cores, need, uses)
    by_width: dict[int, list[int]] = {}
    for core, width in cores:
        by_width.setdefault(width, []).append(core)
    taken: list[Taken] = []
    for width in sorted(by_width, reverse=True):
        same = by_width[width]
        whole = min(need // width, len(same))
        taken += [Taken(core, _units_of(core, width)) for core in same[:whole]]
        need -= whole * width
        if not need:
            break
        if whole < len(same):
            tightest = min(other for other in by_width if need <= other <= width)
            core = by_width[tightest][whole if tightest == width else 0]
            taken.append(Taken(core, _units_of(core, need)))
            break
    return tuple(taken)


def _least_used(cores: Sequence[tuple[int, int]], need: int, uses: Mapping[int, int]) -> tuple[Taken, ...]:
    """Cover a need with the fewest cores, of those with the CPUs that others use least.

    Core by core the cheapest way to each number of cores and of units is kept; ways that can no longer
    reach the need with the fewest cores are dropped, which leaves few.
    """
    widths = sorted((width for _, width in cores), reverse=True)
    count, widest = fewest(widths, need), widths[0]
    slack = count * widest - need
    reached: dict[tuple[int, int], tuple[int, tuple[Taken, ...]]] = {(0, 0): (0, ())}
    for core, width in cores:
        ordered = sorted(cpus_of(core), key=lambda cpu: uses.get(cpu, 0))
        for (opened, units), (cost, taken) in list(reached.items()):
            more, cpus = cost, 0
            for extra, cpu in enumerate(ordered[:width], start=1):
                more += uses.get(cpu, 0)
                cpus |= 1 << cpu
                way = (opened + 1, units + extra)
                if opened == count or way[1] > need or way[0] * widest - way[1] > slack:
                    continue
                if way not in reached or more < reached[way][0]:
                    reached[way] = (more, (*taken, Taken(core, cpus)))
    return reached[count, need][1]


def _units_of(core: int, count: int) -> int:
    return core if core.bit_count() == count else lowest(core, count)


def _fewest_cores(bins: Sequence[Bin], need: int) -> int:
    widths = sorted((width for one in bins for width in one.widths), reverse=True)
    return fewest(widths, need)


def _touching(
    bins: Sequence[Bin], need: int, touched: Sequence[int], uses: Mapping[int, int] | None
) -> CoreChoice | None:
    full = [one for one in bins if one.units]
    best: CoreChoice | None = None
    units = [one.units for one in full]
    looked_at = 0
    for count in range(fewest(units, need), len(full) + 1):
        for chosen in covers(units, range(len(full)), need, count):
            looked_at += 1
            found = _touching_all([full[index] for index in chosen], need, touched, uses)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
            if looked_at > MOST_CHOICES and best is not None:
                return best
        if best is not None:
            return best
    return best


def _touching_all(
    bins: Sequence[Bin], need: int, touched: Sequence[int], uses: Mapping[int, int] | None
) -> CoreChoice | None:
    """Open the widest core of every set that must be touched, then go on as without that."""
    cores = [core for one in bins for core in one.cores]
    opened: list[tuple[int, int]] = []
    for cpus in touched:
        here = [core for core in cores if core[0] & cpus]
        if not here:
            return None
        opened.append(max(here, key=lambda core: core[1]))
    rest = [core for core in cores if core not in opened]
    taken: list[Taken] = []
    for number, (core, width) in enumerate(opened, start=1):
        count = min(width, need - (len(opened) - number))
        taken.append(Taken(core, _units_of(core, count)))
        need -= count
    if need:
        taken += pick_cores(rest, need, uses)
    damage = sum((uses or {}).get(cpu, 0) for one in taken for cpu in cpus_of(one.cpus))
    return CoreChoice(len(bins), len(taken), damage, tuple(taken))
