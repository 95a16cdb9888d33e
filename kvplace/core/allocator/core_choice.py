"""Which cores of a region serve a need: fewest L3 groups, then fewest cores, both exact.

A region is given as bins, one for each L3 group. Among choices that are equal so far the one is taken
that destroys least for later VMs, or for a sharing VM the one whose CPUs are least used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

from kvplace.core.allocator.bin_sets import BinSets, least_cores, most_worth, threads_beyond
from kvplace.core.allocator.layout import Bin
from kvplace.core.allocator.least_used import LeastUsed, Prices, Usage, least_used, likely_prices
from kvplace.core.allocator.look_ahead import damage_of
from kvplace.core.allocator.supply import fewest
from kvplace.core.cpuset import lowest

_MOST_TIES = 16
"""Choices of equal rank looked at for the one with the least damage."""


Rank = tuple[int, int, int]
"""L3 groups, cores, and damage or uses by others: smaller is better."""


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
    def rank(self) -> Rank:
        """Smaller is better."""
        return (self.l3_groups, self.cores, self.damage)


def choose_cores(
    bins: Sequence[Bin],
    need: int,
    *,
    usage: Usage | None = None,
    touched: Sequence[int] = (),
    worst: Rank | None = None,
) -> CoreChoice | None:
    """Serve a need from bins, or None when they hold too little.

    `usage` counts the VMs that name each CPU already: given for a sharing VM where there are any. Every set
    of CPUs in `touched`, which have none in common, must give at least one unit, for which the need must
    suffice. None too when every choice ranks behind `worst`.
    """
    if not need:
        return CoreChoice(0, 0, 0, ())
    full = [one for one in bins if one.units]
    if usage is None and not touched:
        count = fewest([one.units for one in full], need)
        if count > len(full):
            return None
        chosen: Sequence[Bin] | None = full
        if count == 1:
            able = [one for one in full if one.units >= need]
            chosen = [min(able, key=lambda one: (cores_needed((one,), need), _damage((one,), need)))]
        elif count < len(full):
            chosen = _with_least_damage(full, need, worst)
        return _of_bins(chosen, need) if chosen is not None else None
    if sum([one.units for one in full]) < need:
        return None
    if not all(any(core & cpus for one in full for core, _ in one.cores) for cpus in touched):
        return None
    if usage is not None:
        return _least_used_of(full, need, touched, usage, worst)
    _, _, found = BinSets(full, need, touched).smallest()
    return _touching([full[index] for index in found], need, touched)


def _with_least_damage(bins: Sequence[Bin], need: int, worst: Rank | None) -> Sequence[Bin] | None:
    """Of the smallest choices of bins, in L3 groups and cores, one of those with the least damage."""
    count = fewest([one.units for one in bins], need)
    if comb(len(bins), count) <= _MOST_TIES:
        tight_first = combinations(sorted(bins, key=lambda one: one.units), count)
        able = [chosen for chosen in tight_first if sum([one.units for one in chosen]) >= need]
        return min(able, key=lambda chosen: (cores_needed(chosen, need), _damage(chosen, need)))
    sets = BinSets(bins, need)
    count, cores, _ = sets.smallest()
    if worst is not None and (count, cores) > worst[:2]:
        return None
    choices = ([bins[index] for index in sorted(chosen)] for chosen in sets.chosen(count, cores))
    return min(islice(choices, _MOST_TIES), key=lambda chosen: _damage(chosen, need))


def _of_bins(bins: Sequence[Bin], need: int) -> CoreChoice:
    # The large groups are used up, what is left over lies in the smallest: small VMs that settle there
    # then do not keep a large group broken when this one has gone.
    ordered = sorted(bins, key=lambda one: -one.units)
    taken = pick_cores([core for one in ordered for core in one.cores], need)
    return CoreChoice(len(bins), len(taken), _damage(ordered, need), taken)


def _touching(bins: Sequence[Bin], need: int, touched: Sequence[int]) -> CoreChoice:
    """Open the widest core of every set that must be touched, then go on as without that."""
    cores = [core for one in bins for core in one.cores]
    opened = [max([core for core in cores if core[0] & cpus], key=lambda core: core[1]) for cpus in touched]
    rest = [core for core in cores if core not in opened]
    taken: list[Taken] = []
    for number, (core, width) in enumerate(opened, start=1):
        count = min(width, need - (len(opened) - number))
        taken.append(Taken(core, _units_of(core, count)))
        need -= count
    if need:
        taken += pick_cores(rest, need)
    return CoreChoice(len(bins), len(taken), 0, tuple(taken))


def _least_used_of(
    bins: Sequence[Bin], need: int, touched: Sequence[int], usage: Usage, worst: Rank | None
) -> CoreChoice | None:
    """Of the smallest choices of bins one whose CPUs others use least.

    What bins are worth at some prices bounds what a choice of them can cost: only such are looked at that may
    cost less than the best so far.
    """
    sets = BinSets(bins, need, touched)
    count, cores, chosen = sets.smallest()
    prices = usage.prices
    if prices is None:
        everything = usage.offers([core for one in bins for core in one.cores])
        prices = likely_prices(everything, need, cores)
    worths = usage.worths(prices, bins)
    if worst is None or (count, cores) < worst[:2]:
        chosen = next(sets.chosen(count, cores, worths), chosen)
    elif (count, cores) > worst[:2]:
        return None
    else:
        chosen = next(sets.chosen(count, cores, worths, max(0, prices.of(cores, need) - worst[2])), ())
        if not chosen:
            return None
    least = bound_of_uses(prices, bins, worths, need, (count, cores))
    best: LeastUsed | None = None
    seen = set()
    while True:
        seen.add(frozenset(chosen))
        inside = usage.offers([core for index in chosen for core in bins[index].cores])
        usage.looked_at += len(inside)
        found = least_used(inside, need, cores, touched, near=prices)
        if best is None or found.cost < best.cost:
            best = found
        if count == len(bins) or least >= best.cost or (usage.is_spent and len(seen) > 1):
            break
        prices = found.prices
        worths = usage.worths(prices, bins)
        least = max(least, bound_of_uses(prices, bins, worths, need, (count, cores)))
        if least >= best.cost:
            break
        enough = max(0, prices.of(cores, need) - best.cost + 1)
        more = (one for one in sets.chosen(count, cores, worths, enough) if frozenset(one) not in seen)
        chosen = next(more, ())
        if not chosen:
            break
    usage.prices = best.prices
    taken = tuple([Taken(core, cpus) for core, cpus in best.taken])
    return CoreChoice(count, cores, best.cost, taken)


def bound_of_uses(
    prices: Prices, bins: Sequence[Bin], worths: Sequence[int], need: int, size: tuple[int, int]
) -> int:
    """What a need from so many bins and so many cores of them costs at least, by what bins are worth."""
    return prices.of(size[1], need) - most_worth(bins, worths, need, size)


def _damage(bins: Sequence[Bin], need: int) -> int:
    smallest = min(bins, key=lambda one: one.units)
    over = sum(one.units for one in bins) - need
    lost = damage_of(smallest.units, over)
    return lost + sum(damage_of(one.units, 0) for one in bins if one is not smallest)


def cores_needed(bins: Sequence[Bin], need: int) -> int:
    """How many cores of the bins cover a need at least; more than there are when all do not."""
    bins = [one for one in bins if one.units]
    width = bins[0].widths[0]
    if all(one.widths[0] == width == one.widths[-1] for one in bins):
        return -(-need // width)
    return fewest([width for one in bins for width in one.widths], need)


def least_of(bins: Sequence[Bin], need: int, least: int = 0) -> tuple[int, int]:
    """How many bins a need takes at least, and how many cores of so many bins; there must be as much.

    `least` says how many bins it takes in any case.
    """
    if not need:
        return (0, 0)
    full = [one for one in bins if one.units]
    count = max(least, fewest([one.units for one in full], need))
    widest = max([one.widths[0] for one in full])
    if all(one.widths[0] == widest == one.widths[-1] for one in full):
        return count, -(-need // widest)
    beyond = [threads_beyond(one.widths) for one in full]
    amounts = [[of_bin[t] if t < len(of_bin) else 0 for of_bin in beyond] for t in range(widest)]
    amounts.append([sum(of_bin) for of_bin in beyond])
    reach = [sum(sorted(of_bins, reverse=True)[:count]) for of_bins in amounts]
    return count, least_cores(reach, need, widest)


def pick_cores(cores: Sequence[tuple[int, int]], need: int) -> tuple[Taken, ...]:
    """Cover a need with the fewest cores, the last one as tight as possible; they must suffice."""
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
