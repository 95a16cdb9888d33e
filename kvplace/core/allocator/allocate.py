"""Which CPUs and memory one VM gets on one machine.

`place` is the one question that Filter, Bind, the simulator and the offline commands ask; its answer
depends on its arguments alone. Among all placements that the request allows it takes the smallest by
sockets, NUMA nodes, the largest and then the summed distance between them, L3 groups, cores, the damage
to later VMs, and ids, in this order; all but the damage exactly.

The search goes from coarse to fine. First the best sets of NUMA nodes are found by counting alone: the
regions. Only inside those are L3 groups and cores chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, islice

from kvplace.core.allocator.assignment import Seat, placement_of
from kvplace.core.allocator.core_choice import CoreChoice, Rank, Taken, bound_of_uses, choose_cores, least_of
from kvplace.core.allocator.layout import Bin, Cell
from kvplace.core.allocator.look_ahead import damage_of
from kvplace.core.allocator.refusing import refuse
from kvplace.core.allocator.regions import MOST_REGIONS, Region, best_regions, spread_groups, touch_plans
from kvplace.core.allocator.supply import Supply, fewest
from kvplace.core.free import Free, crowd, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request import Policy, Request, Smt
from kvplace.core.topology import Topology

_MOST_EQUALS = 4
"""Regions with equally few L3 groups and cores that are searched for the least damage."""

_MOST_ACROSS = 4_000
"""Sets of L3 groups looked into where these reach over several of the groups that get equal shares."""
_NEVER = 1 << 20
"""More L3 groups than there are, for a share that cannot be served."""


def place(topology: Topology, free: Free, request: Request) -> Placement | Refusal:
    """Choose CPUs and memory for one VM, or say what is missing."""
    return try_place(topology, free, request) or refuse(
        Supply(topology, free, request),
        never=not _fits_empty(topology, request),
        fits=lambda other: bool(best_regions(Supply(topology, free, other))),
    )


def try_place(topology: Topology, free: Free, request: Request) -> Placement | None:
    """Choose as `place` does; None where it refuses, whose reasons may cost more than the search."""
    supply = Supply(topology, free, request)
    seat = _best_seat(supply)
    return None if seat is None else placement_of(supply, seat)


@lru_cache(maxsize=4096)
def _fits_empty(topology: Topology, request: Request) -> bool:
    return bool(best_regions(Supply(topology, free_of(topology, Ledger()), request)))


def _best_seat(supply: Supply) -> Seat | None:
    regions = _unlike(supply, best_regions(supply))
    if len(regions) > 1:
        promised = sorted(
            ((_promise(supply, region), region) for region in regions), key=lambda pair: pair[0]
        )
    else:
        promised = [((0, 0, 0, 0), region) for region in regions]
    best: _Found | None = None
    worst: Rank | None = None
    for number, (promise, region) in enumerate(promised):
        if best is not None:
            if promise > best.key or (number >= _MOST_EQUALS and promise[:3] >= best.key[:3]):
                break
            # Past some equally good regions only better ones count.
            worst = (*best.key[:2], best.key[2] - (number >= _MOST_EQUALS))
            if promise[:2] == worst[:2] and _uses_at_least(supply, region, best) > worst[2]:
                continue
        choice = _serve(supply, region, worst)
        if choice is not None:
            found = _weighed(supply, region, choice)
            if best is None or found.is_better_than(best):
                best = found
    return best.seat if best is not None else None


def _uses_at_least(supply: Supply, region: Region, best: _Found) -> int:
    """How many uses CPUs of a region have by others at least, where it takes as few groups and cores."""
    usage = supply.usage
    if usage is None or usage.prices is None:
        return 0
    if usage.is_spent:
        return best.key[2] + 1
    bins = [one for one in _bins(supply, region, region.cells) if one.units]
    worths = usage.worths(usage.prices, bins)
    return bound_of_uses(usage.prices, bins, worths, supply.need, best.key[:2])


@dataclass(frozen=True, slots=True)
class _Found:
    key: tuple[int, int, int, int]
    """L3 groups, cores, uses by others of what a sharing VM names, damage to later VMs."""
    cpus: int
    seat: Seat

    def is_better_than(self, other: _Found) -> bool:
        if self.key != other.key:
            return self.key < other.key
        unlike = self.cpus ^ other.cpus
        return bool(self.cpus & unlike & -unlike)


def _promise(supply: Supply, region: Region) -> tuple[int, int, int, int]:
    """A key that no choice inside the region can be better than; far cheaper than the choice itself."""
    if supply.request.options.policy is Policy.NUMA:
        choice = _whole_pool(supply, region)
        return _weighed(supply, region, choice).key
    giving = 0 if len(region.parts) > supply.need or not supply.needs_memory else len(region.parts)
    apart = 0 if region.domain.straddled else giving
    if supply.spreads and len(region.parts) <= supply.need and not region.domain.straddled:
        l3_groups, cores = _promise_of_shares(supply, region)
        if l3_groups < apart:
            l3_groups, cores = least_of(_bins(supply, region, region.cells), supply.need, apart)
    elif len(region.parts) > 1 or region.domain.crossed:
        l3_groups, cores = least_of(_bins(supply, region, region.cells), supply.need, apart)
    else:
        return _promise_of_node(supply, region)
    lost = _promise_of_nodes(supply, region) if supply.request.owns_cpus else 0
    return (l3_groups, max(cores, giving), 0, lost)


def _promise_of_nodes(supply: Supply, region: Region) -> int:
    """The least damage to NUMA nodes: what they have left is worth most together in one of them."""
    free = [(supply.free.cpus & part.cpus).bit_count() for part in region.parts]
    left = max(0, sum(free) - supply.need)
    return sum([damage_of(amount, 0) for amount in free]) - damage_of(left, 0)


def _promise_of_node(supply: Supply, region: Region) -> tuple[int, int, int, int]:
    (part,) = region.parts
    count = supply.count(part)
    lost = 0
    if supply.request.owns_cpus:
        free = (supply.free.cpus & part.cpus).bit_count()
        lost = damage_of(free, free - supply.need)
    return (*count.least_for(supply.need), 0, lost)


def _promise_of_shares(supply: Supply, region: Region) -> tuple[int, int]:
    """L3 groups and cores that equal shares take at least."""
    groups = spread_groups(supply, region)
    low, over = divmod(supply.need, len(groups))
    l3_groups = cores = 0
    larger: list[tuple[int, int]] = []
    for cells in groups:
        (count, opened), more = _least_of_share(supply, region, cells, low)
        l3_groups += count
        cores += opened
        if more is not None:
            larger.append((more[0] - count, more[1] - opened))
    for more_groups, more_opened in sorted(larger)[:over]:
        l3_groups += more_groups
        cores += more_opened
    return (l3_groups, cores)


def _least_of_share(
    supply: Supply, region: Region, cells: Sequence[Cell], low: int
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """What a share takes at least, and what one unit more; regions have groups in common."""
    key = (low, *[cell.cpus for cell in cells])
    if key not in supply.least_of_shares:
        bins = _bins(supply, region, cells)
        more = sum([one.units for one in bins]) > low
        supply.least_of_shares[key] = (least_of(bins, low), least_of(bins, low + 1) if more else None)
    return supply.least_of_shares[key]


def _unlike(supply: Supply, regions: list[Region]) -> list[Region]:
    """Leave out regions that differ from an earlier one in nothing but ids."""
    if len(regions) == 1 or supply.uses:
        return regions
    unlike: dict[object, Region] = {}
    for region in regions:
        if region.domain.crossed or (region.domain.straddled and len(region.parts) > 1):
            return regions
        kinds = [
            (supply.count(part).kind, (supply.free.cpus & part.cpus).bit_count()) for part in region.parts
        ]
        unlike.setdefault(tuple(sorted(kinds)), region)
    return list(unlike.values())


# Inside a region.


def _serve(supply: Supply, region: Region, worst: Rank | None) -> CoreChoice | None:
    """Serve the VM from a region; None too when it is not served as well as what is the `worst` of use."""
    if supply.request.options.policy is Policy.NUMA:
        return _whole_pool(supply, region)
    if not supply.spreads:
        touched = _must_be_touched(supply, region)
        bins = _bins(supply, region, region.cells)
        return choose_cores(bins, supply.need, usage=supply.usage, touched=touched, worst=worst)
    groups = spread_groups(supply, region)
    if len(region.parts) > supply.need:
        return _serve_some(supply, region, groups)
    if not region.domain.crossed and (len(region.parts) == len(groups) or not supply.needs_memory):
        return _serve_evenly(supply, region, groups, [()] * len(groups))
    return _better(_serve_evenly(supply, region, groups, touched) for touched in touch_plans(region, groups))


def _better(choices: Iterable[CoreChoice | None]) -> CoreChoice | None:
    found = [choice for choice in choices if choice is not None]
    return min(found, key=lambda choice: choice.rank) if found else None


def _serve_evenly(
    supply: Supply, region: Region, groups: Sequence[Sequence[Cell]], touched: Sequence[Sequence[int]]
) -> CoreChoice | None:
    """Share the need out over groups of cells, with equal shares but for one unit.

    `touched` has for each group the CPUs of the NUMA nodes that must give one there.
    """
    labels = {cell.l3 for cells in groups for cell in cells}
    if len({(cell.l3, index) for index, cells in enumerate(groups) for cell in cells}) == len(labels):
        return _serve_each(supply, region, groups, touched)
    return _serve_across(supply, region, groups, touched)


def _serve_some(supply: Supply, region: Region, groups: Sequence[Sequence[Cell]]) -> CoreChoice | None:
    """Share the need out over any of the groups: the VM uses the others for their memory alone."""
    best: CoreChoice | None = None
    most = min(supply.need, len(groups))
    for count in range(1, most + 1):
        if best is not None and best.l3_groups < count and not region.domain.straddled:
            break
        if region.domain.straddled:
            served = (
                _serve_evenly(supply, region, chosen, [()] * count)
                for chosen in islice(combinations(groups, count), MOST_REGIONS)
            )
            found = _better(served)
        else:
            found = _serve_so_many(supply, region, groups, count)
        best = _better((best, found))
    return best


def _serve_so_many(
    supply: Supply, region: Region, groups: Sequence[Sequence[Cell]], count: int
) -> CoreChoice | None:
    """Share the need out over the `count` groups that serve it best, group by group."""
    low, over = divmod(supply.need, count)
    ways: dict[tuple[int, int], CoreChoice] = {(0, 0): CoreChoice(0, 0, 0, ())}
    """The best way for each number of groups and of those with a larger share."""
    for cells in groups:
        for (number, larger), before in list(ways.items()):
            for more in (0, 1):
                way = (number + 1, larger + more)
                if way[0] > count or way[1] > over:
                    continue
                share = _share(supply, region, cells, low + more)
                if share is None:
                    continue
                together = _together((before, share))
                if way not in ways or together.rank < ways[way].rank:
                    ways[way] = together
    return ways.get((count, over))


def _share(
    supply: Supply,
    region: Region,
    cells: Sequence[Cell],
    need: int,
    touched: Sequence[int] = (),
    *,
    as_one: bool = False,
) -> CoreChoice | None:
    """Serve a share of the need from one group; regions have groups in common, so it is remembered.

    `as_one` says that it does not matter here how many L3 groups that takes.
    """
    key = (tuple([cell.cpus for cell in cells]), need, as_one, *touched)
    if key not in supply.shares:
        bins = [supply.bin(cells)] if as_one else _bins(supply, region, cells)
        supply.shares[key] = choose_cores(bins, need, usage=supply.usage, touched=touched)
    return supply.shares[key]


def _together(shares: Sequence[CoreChoice]) -> CoreChoice:
    return CoreChoice(
        sum([share.l3_groups for share in shares]),
        sum([share.cores for share in shares]),
        sum([share.damage for share in shares]),
        tuple([taken for share in shares for taken in share.taken]),
    )


def _serve_each(
    supply: Supply,
    region: Region,
    groups: Sequence[Sequence[Cell]],
    touched: Sequence[Sequence[int]],
    *,
    as_one: bool = False,
) -> CoreChoice | None:
    """Serve each group by itself, with one unit more where that must be or costs least."""
    low, over = divmod(supply.need, len(groups))
    shares: dict[int, CoreChoice] = {}
    larger: list[tuple[tuple[int, ...], int, CoreChoice]] = []
    for index, cells in enumerate(groups):
        inside = [cpus for cpus in touched[index] if any(cell.cpus & ~cpus for cell in cells) or not cells]
        share = None
        if len(inside) <= low:
            share = _share(supply, region, cells, low, inside, as_one=as_one)
        more = None
        if over and len(inside) <= low + 1:
            more = _share(supply, region, cells, low + 1, inside, as_one=as_one)
        if share is not None:
            shares[index] = share
        if more is not None:
            before = share.rank if share is not None else (_NEVER, 0, 0)
            costs = tuple(b - a for a, b in zip(before, more.rank, strict=True))
            larger.append((costs, index, more))
    costly = sorted(larger, key=lambda entry: entry[:2])
    shares |= {index: more for _, index, more in costly[:over]}
    if len(larger) < over or len(shares) < len(groups):
        return None
    return _together([shares[index] for index in range(len(groups))])


def _serve_across(
    supply: Supply, region: Region, groups: Sequence[Sequence[Cell]], touched: Sequence[Sequence[int]]
) -> CoreChoice | None:
    """Share out evenly where L3 groups reach over several of the groups: the fewest of them first.

    Past a bound, as few as are left when one after the other is given up.
    """
    labels = sorted({cell.l3 for cells in groups for cell in cells})
    low = supply.need // len(groups)
    units = {
        label: [supply.cell_units([cell for cell in cells if cell.l3 == label]) for cells in groups]
        for label in labels
    }

    def within(chosen: Collection[int]) -> CoreChoice | None:
        if any(sum(units[label][index] for label in chosen) < low for index in range(len(groups))):
            return None
        inside = [[cell for cell in cells if cell.l3 in chosen] for cells in groups]
        served = _serve_each(supply, region, inside, touched, as_one=True)
        return served and replace(served, l3_groups=len(chosen))

    if within(labels) is None:
        return None
    looked_at = 0
    for count in range(fewest([sum(units[label]) for label in labels], supply.need), len(labels) + 1):
        best: CoreChoice | None = None
        for chosen in combinations(labels, count):
            looked_at += 1
            if looked_at > _MOST_ACROSS:
                break
            best = _better((best, within(chosen)))
        if best is not None:
            return best
        if looked_at > _MOST_ACROSS:
            break
    for label in sorted(labels, key=lambda label: sum(units[label])):
        fewer = [other for other in labels if other != label]
        if within(fewer) is not None:
            labels = fewer
    return within(labels)


def _must_be_touched(supply: Supply, region: Region) -> list[int]:
    """The CPUs of each NUMA node, when not all of them would give a CPU without being told to.

    That is so only where the VM needs the node for its memory: no other region has a node too many.
    """
    parts = region.parts
    if not supply.needs_memory or not 1 < len(parts) <= supply.need:
        return []
    units = [region.units_of(supply, part) for part in parts]
    if sum(units) - min(units) < supply.need:
        return []
    return [part.cpus for part in parts]


def _bins(supply: Supply, region: Region, cells: Iterable[Cell]) -> list[Bin]:
    if not region.domain.straddled:
        return [supply.bin((cell,)) for cell in cells]
    by_l3: dict[int, list[Cell]] = {}
    # As with L3 groups, the NUMA nodes with most are used up, and what is left over lies in the smallest.
    free = {part.node: supply.units(part) for part in region.parts}
    for cell in sorted(cells, key=lambda cell: -free[cell.node]):
        by_l3.setdefault(cell.l3, []).append(cell)
    return [supply.bin(group) for group in by_l3.values()]


def _whole_pool(supply: Supply, region: Region) -> CoreChoice:
    """Policy `numa`: all CPUs of the shared pool there, the less crowded the better."""
    taken = [Taken(core, core) for one in _bins(supply, region, region.cells) for core, _ in one.cores]
    return CoreChoice(0, 0, _crowd(supply, region), tuple(taken))


def _crowd(supply: Supply, region: Region) -> int:
    return crowd([use for cell in region.cells for use in supply.uses_of(cell)], supply.need)


def _weighed(supply: Supply, region: Region, choice: CoreChoice) -> _Found:
    cpus = owned = 0
    for taken in choice.taken:
        cpus |= taken.cpus
        owned |= taken.core if supply.smt is not Smt.PREFER else taken.cpus
    lost = _damage(supply, region, owned)
    uses = 0 if supply.request.owns_cpus else choice.damage
    nodes = tuple(part.node for part in region.parts)
    return _Found((choice.l3_groups, choice.cores, uses, lost), cpus, Seat(nodes, choice.taken))


def _damage(supply: Supply, region: Region, owned: int) -> int:
    lost = 0
    for part in region.parts:
        if owned & part.cpus:
            lost += _lost(supply.free.cpus & part.cpus, owned)
            lost += sum([_lost(supply.free.cpus & cell.cpus, owned) for cell in part.cells])
    return lost


def _lost(free: int, owned: int) -> int:
    before = free.bit_count()
    return damage_of(before, before - (free & owned).bit_count())
