"""Which cores of a region serve a need: fewest L3 groups, then fewest cores, both exact.

A region is given as bins, one for each L3 group. Among choices that are equal so far the one is taken
that destroys least for later VMs, or for a sharing VM the one whose CPUs are least used.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from kvplace.core.allocator.layout import Bin
from kvplace.core.allocator.least_used import least_used
from kvplace.core.allocator.look_ahead import damage_of
from kvplace.core.allocator.supply import fewest
from kvplace.core.cpuset import cpus_of, lowest

MOST_CHOICES = 20_000
"""Choices looked at before a search settles for the best so far; reached on contrived machines only."""
_MOST_TIES = 16
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
    if touched:
        return _touching(bins, need, touched, uses)
    full: Sequence[Bin] = [one for one in bins if one.units]
    chosen: Sequence[Bin]
    count = fewest([one.units for one in full], need)
    if count > len(full):
        return None
    if uses:
        return _least_used_of(full, need, count, uses)
    if count == len(full):
        chosen = full
    elif count == 1:
        able = [one for one in full if one.units >= need]
        chosen = [min(able, key=lambda one: (cores_needed((one,), need), _damage((one,), need)))]
    else:
        chosen = _best_bins(full, need, count)
    # The large groups are used up, what is left over lies in the smallest: small VMs that settle there
    # then do not keep a large group broken when this one has gone.
    ordered = sorted(chosen, key=lambda one: -one.units)
    taken = pick_cores([core for one in ordered for core in one.cores], need)
    return CoreChoice(len(chosen), len(taken), _damage(ordered, need), taken)


def _best_bins(bins: Sequence[Bin], need: int, count: int) -> Sequence[Bin]:
    """Of the choices of `count` bins one with the fewest cores, of those with the least damage."""
    kinds = [one.widths for one in bins]
    choices = _with_fewest_cores(bins, kinds, need, count)
    return min(islice(choices, _MOST_TIES), key=lambda chosen: _damage(chosen, need))


def _least_used_of(bins: Sequence[Bin], need: int, count: int, uses: Mapping[int, int]) -> CoreChoice:
    """Of the choices of `count` bins one with the fewest cores, of those with the least used CPUs."""
    best: CoreChoice | None = None
    for chosen in islice(_with_fewest_cores(bins, range(len(bins)), need, count), _MOST_TIES):
        taken = pick_cores([core for one in chosen for core in one.cores], need, uses)
        found = CoreChoice(count, len(taken), _uses(taken, uses), taken)
        if best is None or found.rank < best.rank:
            best = found
    assert best is not None
    return best


def _with_fewest_cores(
    bins: Sequence[Bin], kinds: Sequence[Hashable], need: int, count: int
) -> Iterator[list[Bin]]:
    """Yield the choices of `count` bins that cover a need with the fewest cores, the tightest first.

    The largest m of some cores give a need just when for every t their threads beyond t make up for the
    rest: the sum of what each core has more than t must be the need less m times t. That is a cover by
    several amounts, one for each t.
    """
    units = [one.units for one in bins]
    beyond = _threads_beyond(bins)
    cores = max(
        -(-(need - sum(sorted(amounts, reverse=True)[:count])) // t)
        for t, amounts in enumerate([*beyond, [0] * len(bins)], start=1)
    )
    found = False
    while not found:
        also = [(amounts, need - cores * t) for t, amounts in enumerate(beyond, start=1)]
        for indexes in covers(units, kinds, need, count, also=also, tight_first=True):
            found = True
            yield [bins[index] for index in indexes]
        cores += 1


def _threads_beyond(bins: Sequence[Bin]) -> list[list[int]]:
    """For 1, 2 and so on how many units the cores of each bin have beyond that; none beyond the last."""
    widest = max([one.widths[0] for one in bins])
    narrowest = min([one.widths[-1] for one in bins])
    return [
        [sum([width - t for width in one.widths if width > t]) for one in bins]
        for t in range(1, widest)
        if narrowest < widest
    ]


def covers(
    units: Sequence[int],
    kinds: Sequence[Hashable],
    need: int,
    count: int,
    *,
    also: Sequence[tuple[Sequence[int], int]] = (),
    tight_first: bool = False,
) -> Iterator[tuple[int, ...]]:
    """Yield every choice of `count` groups that covers a need, as ascending indexes.

    Groups of one kind are interchangeable: of choices that differ in nothing else only the one with the
    lowest indexes comes. Choices with large groups come first, or with `tight_first` last. `also` are
    further amounts by group, with the need that each must cover; groups of one kind have equal ones.
    """
    members: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        members.setdefault((units[index], kind), []).append(index)
    classes = sorted(members.values(), key=lambda indexes: -units[indexes[0]])
    if tight_first:
        classes.reverse()
    sizes = [units[indexes[0]] for indexes in classes]
    starts = [0, *accumulate(len(indexes) for indexes in classes)]
    sums = [0, *accumulate(units[index] for indexes in classes for index in indexes)]
    others = [_Amount(amounts, missing, classes) for amounts, missing in also]

    def choose(place: int, missing: int, left: int) -> Iterator[tuple[int, ...]]:
        if not left:
            if missing <= 0 and all(other.missing <= 0 for other in others):
                yield ()
            return
        start = starts[place]
        if start + left >= len(sums):
            return
        most = sums[-1] - sums[-1 - left] if tight_first else sums[start + left] - sums[start]
        if most < missing or any(other.most[place][left] < other.missing for other in others):
            return
        indexes = classes[place]
        for number in range(min(left, len(indexes)), -1, -1):
            for other in others:
                other.missing -= number * other.sizes[place]
            for rest in choose(place + 1, missing - number * sizes[place], left - number):
                yield (*indexes[:number], *rest)
            for other in others:
                other.missing += number * other.sizes[place]

    for chosen in choose(0, need, count):
        yield tuple(sorted(chosen))


class _Amount:
    """A further amount that a choice of groups must cover, and what is missing of it on the way."""

    def __init__(self, amounts: Sequence[int], need: int, classes: Sequence[Sequence[int]]) -> None:
        self.missing = need
        self.sizes = [amounts[indexes[0]] for indexes in classes]
        self.most = [[0]]
        largest: list[int] = []
        for size, indexes in zip(reversed(self.sizes), reversed(classes), strict=True):
            largest += [size] * len(indexes)
            largest.sort(reverse=True)
            self.most.append([0, *accumulate(largest)])
        self.most.reverse()
        """What the largest groups of the classes from a place on give together, by their number."""


def _damage(bins: Sequence[Bin], need: int) -> int:
    smallest = min(bins, key=lambda one: one.units)
    over = sum(one.units for one in bins) - need
    lost = damage_of(smallest.units, over)
    return lost + sum(damage_of(one.units, 0) for one in bins if one is not smallest)


def _uses(taken: Iterable[Taken], uses: Mapping[int, int]) -> int:
    return sum(uses.get(cpu, 0) for one in taken for cpu in cpus_of(one.cpus))


def cores_needed(bins: Sequence[Bin], need: int) -> int:
    """How many cores of the bins cover a need at least; more than there are when all do not."""
    bins = [one for one in bins if one.units]
    width = bins[0].widths[0]
    if all(one.widths[0] == width == one.widths[-1] for one in bins):
        return -(-need // width)
    return fewest([width for one in bins for width in one.widths], need)


def pick_cores(
    cores: Sequence[tuple[int, int]], need: int, uses: Mapping[int, int] | None = None
) -> tuple[Taken, ...]:
    """Cover a need with the fewest cores, the last one as tight as possible; they must suffice."""
    if uses:
        return tuple([Taken(core, cpus) for core, cpus in least_used(cores, need, uses)])
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


def _units_of(core: int, count: int) -> int:
    return core if core.bit_count() == count else lowest(core, count)


def _touching(
    bins: Sequence[Bin], need: int, touched: Sequence[int], uses: Mapping[int, int] | None
) -> CoreChoice | None:
    full = [one for one in bins if one.units]
    units = [one.units for one in full]
    inside = [tuple([tuple([w for core, w in one.cores if core & cpus]) for cpus in touched]) for one in full]
    also = [([int(bool(widths[place])) for widths in inside], 1) for place in range(len(touched))]
    anywhere = _touching_all(full, need, touched, None) if sum(units) >= need else None
    if anywhere is None:
        return None
    for count in range(fewest(units, need), len(full) + 1):
        best = _touching_with(full, need, count, inside, also, touched, anywhere.cores)
        if best is None:
            continue
        choices = [best]
        if uses:  # whose bins are all unlike: some more are looked at
            more = islice(covers(units, range(len(full)), need, count, also=also), _MOST_TIES)
            choices += [[full[index] for index in chosen] for chosen in more]
        served = [_touching_all(chosen, need, touched, uses) for chosen in choices]
        return min([one for one in served if one is not None], key=lambda one: one.rank)
    return None


def _touching_with(
    bins: Sequence[Bin],
    need: int,
    count: int,
    kinds: Sequence[Hashable],
    also: Sequence[tuple[Sequence[int], int]],
    touched: Sequence[int],
    least: int,
) -> list[Bin] | None:
    """Of the choices of `count` bins with something of every set one with the fewest cores.

    Once there is one, only such are looked at whose widest cores could do with fewer.
    """
    units = [one.units for one in bins]
    beyond = _threads_beyond(bins)
    best: list[Bin] | None = None
    cores, looked_at = need + 1, 0
    while cores > least:
        fewer = [(amounts, need - (cores - 1) * t) for t, amounts in enumerate(beyond, start=1)]
        for indexes in covers(units, kinds, need, count, also=[*also, *fewer]):
            chosen = [bins[index] for index in indexes]
            found = _touching_all(chosen, need, touched, None)
            looked_at += 1
            if found is not None and found.cores < cores:
                best, cores = chosen, found.cores
                break
            if looked_at > MOST_CHOICES and best is not None:
                return best
        else:
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
    return CoreChoice(len(bins), len(taken), _uses(taken, uses or {}), tuple(taken))
