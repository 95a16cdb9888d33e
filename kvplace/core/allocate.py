"""Which CPUs and memory one VM gets on one machine.

`place` is the one question that Filter, Bind, the simulator and the offline commands ask; its answer
depends on its arguments alone. Among all placements that the request allows it takes the smallest by
sockets, NUMA nodes, the largest and then the summed distance between them, L3 groups, cores, the damage
to later VMs, and ids, in this order; all but the damage exactly.

The search goes from coarse to fine. First the best sets of NUMA nodes are found by counting alone: the
regions. Only inside those are L3 groups and cores chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from kvplace.core.assignment import Seat, placement_of
from kvplace.core.core_choice import MOST_CHOICES, CoreChoice, Taken, choose_cores, covers
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free import Free, free_of
from kvplace.core.layout import Bin, Cell, Domain, NodePart
from kvplace.core.ledger import Ledger
from kvplace.core.look_ahead import slots_lost
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.refusing import refuse
from kvplace.core.request import Policy, Request, Scope, Smt
from kvplace.core.supply import Supply, fewest
from kvplace.core.topology import Topology

_MOST_REGIONS = 64
"""Equally good regions that are searched for the one with the fewest cores and the least damage."""


def place(topology: Topology, free: Free, request: Request) -> Placement | Refusal:
    """Choose CPUs and memory for one VM, or say what is missing."""
    supply = Supply(topology, free, request)
    seat = _best_seat(supply)
    if seat is None:
        return refuse(
            supply,
            never=not _fits_empty(topology, request),
            fits=lambda other: bool(_best_regions(Supply(topology, free, other))),
        )
    return placement_of(supply, seat)


@lru_cache(maxsize=4096)
def _fits_empty(topology: Topology, request: Request) -> bool:
    return bool(_best_regions(Supply(topology, free_of(topology, Ledger()), request)))


_Rank = tuple[int, int, int, int]
"""Sockets, NUMA nodes, the largest and the summed distance between them."""


@dataclass(frozen=True, slots=True)
class _Region:
    """NUMA nodes that serve the VM together, and the packages of them that it uses."""

    parts: tuple[NodePart, ...]
    packages: int

    @property
    def cells(self) -> Iterator[Cell]:
        """The cells of the nodes in those packages."""
        for part in self.parts:
            for cell in part.cells:
                if self.packages >> cell.package & 1:
                    yield cell


def _best_seat(supply: Supply) -> Seat | None:
    best: tuple[tuple[int, ...], Seat] | None = None
    for region in _unlike(supply, _best_regions(supply)):
        choice = _serve(supply, region)
        if choice is None:
            continue
        found = _weighed(supply, region, choice)
        if best is None or found[0] < best[0]:
            best = found
    return best[1] if best is not None else None


# Regions.


def _best_regions(supply: Supply) -> list[_Region]:
    """Find all regions that can serve the VM and are the best by their rank; none when it does not fit."""
    best: _Rank | None = None
    regions: list[_Region] = []
    for domain in supply.layout.domains[supply.request.scope]:
        for rank, region in _regions(supply, domain, best):
            if best is None or rank < best:
                best, regions = rank, [region]
            elif rank == best:
                regions.append(region)
    return regions


def _regions(supply: Supply, domain: Domain, best: _Rank | None) -> Iterator[tuple[_Rank, _Region]]:
    """Yield regions of a domain that can serve the VM, the best among them; `best` is known elsewhere."""
    parts = [(part, units) for part in domain.parts if (units := supply.units(part))]
    if sum(units for _, units in parts) < supply.need:
        return
    everywhere = [part.node for part, _ in parts]
    if not supply.memory_fits(everywhere):
        return
    amounts = [units for _, units in parts]
    fewest_nodes = max(fewest(amounts, supply.need), supply.fewest_nodes_for_memory(everywhere))
    fewest_packages = _fewest_packages(supply, [part for part, _ in parts], supply.need)
    for count in range(fewest_nodes, len(parts) + 1):
        if best is not None and (fewest_packages, count) > best[:2]:
            break
        for members in _node_sets(supply, parts, count):
            for rank, region in _with_packages(supply, members, best):
                if best is None or rank < best:
                    best = rank
                yield rank, region
        if best is not None and best[0] <= fewest_packages:
            break


def _node_sets(
    supply: Supply, parts: Sequence[tuple[NodePart, int]], count: int
) -> Iterator[tuple[NodePart, ...]]:
    """Yield the sets of so many parts that have the units and the memory, in the machine's order."""
    units = [units for _, units in parts]
    if count == 1:
        for part, amount in parts:
            if amount >= supply.need and supply.memory_fits((part.node,)):
                yield (part,)
        return
    kinds = range(len(parts))
    for number, chosen in enumerate(covers(units, kinds, supply.need, count)):
        members = tuple(parts[index][0] for index in chosen)
        if supply.memory_fits([part.node for part in members]):
            yield members
        if number >= MOST_CHOICES:
            return


def _with_packages(
    supply: Supply, parts: tuple[NodePart, ...], best: _Rank | None
) -> Iterator[tuple[_Rank, _Region]]:
    """Yield the region of NUMA nodes, or several where a choice of packages is left in them."""
    distances = supply.layout.distances
    pairs = [distances[a.node][b.node] for a, b in combinations(parts, 2)]
    far, sum_of = max(pairs, default=0), sum(pairs)
    everything = 0
    for part in parts:
        everything |= part.packages
    crossed = any(part.packages & (part.packages - 1) for part in parts)
    if supply.request.policy is Policy.NUMA and crossed:
        everything = mask_of(p for p in cpus_of(everything) if _units_of_package(supply, parts, p))
    elif len(parts) <= supply.need and crossed:
        yield from _choose_packages(supply, parts, everything, (len(parts), far, sum_of), best)
        return
    rank = (everything.bit_count(), len(parts), far, sum_of)
    region = _Region(parts, everything)
    if (best is None or rank <= best) and _spreads(supply, region):
        yield rank, region


def _choose_packages(
    supply: Supply,
    parts: tuple[NodePart, ...],
    everything: int,
    nodes_rank: tuple[int, int, int],
    best: _Rank | None,
) -> Iterator[tuple[_Rank, _Region]]:
    """Yield the regions with the fewest packages in NUMA nodes that lie in several."""
    packages = list(cpus_of(everything))
    units = [_units_of_package(supply, parts, package) for package in packages]
    for count in range(fewest(units, supply.need), len(packages) + 1):
        found = False
        rank = (count, *nodes_rank)
        if best is not None and rank > best:
            return
        for number, chosen in enumerate(covers(units, range(len(units)), supply.need, count)):
            mask = 0
            for index in chosen:
                mask |= 1 << packages[index]
            region = _Region(parts, mask)
            if _spreads(supply, region) and _reaches(supply, region):
                found = True
                yield rank, region
            if number >= _MOST_REGIONS and found:
                break
        if found:
            return


def _fewest_packages(supply: Supply, parts: Sequence[NodePart], need: int) -> int:
    packages = 0
    for part in parts:
        packages |= part.packages
    return fewest([_units_of_package(supply, parts, package) for package in cpus_of(packages)], need)


def _units_of_package(supply: Supply, parts: Iterable[NodePart], package: int) -> int:
    total = 0
    for part in parts:
        if part.packages == 1 << package:
            total += supply.units(part)
        elif part.packages >> package & 1:
            total += supply.cell_units(cell for cell in part.cells if cell.package == package)
    return total


def _reaches(supply: Supply, region: _Region) -> bool:
    """Whether every NUMA node can give a CPU in the packages of the region."""
    return all(
        supply.cell_units(cell for cell in part.cells if region.packages >> cell.package & 1)
        for part in region.parts
    )


def _spreads(supply: Supply, region: _Region) -> bool:
    """Whether the need can be shared out evenly, where the scope asks for that."""
    groups = _spread_groups(supply, region)
    if len(groups) == 1 or len(region.parts) > supply.need:
        return True
    low, over = divmod(supply.need, len(groups))
    units = [supply.cell_units(cells) for cells in groups]
    nodes = [len({cell.node for cell in cells}) for cells in groups]
    if min(units) < low or max(nodes) > low + 1:
        return False
    if any(count > low >= amount for count, amount in zip(nodes, units, strict=True)):
        return False
    return sum(1 for count in nodes if count > low) <= over <= sum(1 for amount in units if amount > low)


def _spread_groups(supply: Supply, region: _Region) -> list[list[Cell]]:
    """The cells of the region by what the scope spreads over; all in one group when it does not spread."""
    groups: dict[int, list[Cell]] = {}
    for cell in region.cells:
        match supply.request.scope:
            case Scope.SPREAD_SOCKETS:
                groups.setdefault(cell.package, []).append(cell)
            case Scope.SPREAD_NUMA:
                groups.setdefault(cell.node, []).append(cell)
            case _:
                groups.setdefault(0, []).append(cell)
    return list(groups.values())


def _unlike(supply: Supply, regions: Sequence[_Region]) -> Iterator[_Region]:
    """Leave out regions that differ from an earlier one in nothing but ids."""
    if len(regions) == 1 or supply.uses:
        yield from regions[:_MOST_REGIONS]
        return
    seen = set()
    for region in regions:
        kind = tuple(
            sorted(
                (
                    tuple(sorted((supply.bin((cell,)).widths for cell in cells), reverse=True)),
                    (supply.free.cpus & part.cpus).bit_count(),
                )
                for part in region.parts
                for cells in [[c for c in part.cells if region.packages >> c.package & 1]]
            )
        )
        labels = tuple(sorted(cell.l3 for cell in region.cells))
        alike = (kind, len(set(labels)), len(labels))
        if alike in seen:
            continue
        seen.add(alike)
        yield region
        if len(seen) >= _MOST_REGIONS:
            return


# Inside a region.


def _serve(supply: Supply, region: _Region) -> CoreChoice | None:
    if supply.request.policy is Policy.NUMA:
        return _whole_pool(supply, region)
    groups = _spread_groups(supply, region)
    uses = None if supply.request.owns_cpus else supply.uses
    touched = _must_be_touched(supply, region)
    if len(groups) == 1:
        return choose_cores(_bins(supply, groups[0]), supply.need, uses=uses, touched=touched)
    if len(region.parts) > supply.need:
        return _serve_some(supply, groups)
    return _serve_evenly(supply, groups, touched)


def _serve_evenly(
    supply: Supply, groups: Sequence[Sequence[Cell]], touched: Sequence[int] = ()
) -> CoreChoice | None:
    """Share the need out over groups of cells, with equal shares but for one unit."""
    labels = {cell.l3 for cells in groups for cell in cells}
    if len({(cell.l3, index) for index, cells in enumerate(groups) for cell in cells}) == len(labels):
        return _serve_each(supply, groups, touched)
    return _serve_across(supply, groups, touched)


def _serve_some(supply: Supply, groups: Sequence[Sequence[Cell]]) -> CoreChoice | None:
    """Share the need out over any of the groups: the VM uses the others for their memory alone."""
    best: CoreChoice | None = None
    for count in range(1, min(supply.need, len(groups)) + 1):
        for number, chosen in enumerate(combinations(groups, count)):
            found = _serve_evenly(supply, chosen)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
            if number >= _MOST_REGIONS and best is not None:
                break
    return best


def _serve_each(
    supply: Supply, groups: Sequence[Sequence[Cell]], touched: Sequence[int]
) -> CoreChoice | None:
    """Serve each group by itself, with one unit more where that must be or costs least."""
    low, over = divmod(supply.need, len(groups))
    uses = None if supply.request.owns_cpus else supply.uses
    shares: dict[int, CoreChoice] = {}
    larger: list[tuple[tuple[int, ...], int, CoreChoice]] = []
    for index, cells in enumerate(groups):
        bins = _bins(supply, cells)
        inside = [cpus for cpus in touched if any(cpus & cell.cpus for cell in cells)]
        share = choose_cores(bins, low, uses=uses, touched=inside) if len(inside) <= low else None
        more = choose_cores(bins, low + 1, uses=uses, touched=inside) if len(inside) <= low + 1 else None
        if share is not None:
            shares[index] = share
        if more is not None and over:
            before = share.rank if share is not None else (MOST_CHOICES, 0, 0)
            costs = tuple(b - a for a, b in zip(before, more.rank, strict=True))
            larger.append((costs, index, more))
    costly = sorted(larger, key=lambda entry: entry[:2])
    shares |= {index: more for _, index, more in costly[:over]}
    if len(larger) < over or len(shares) < len(groups):
        return None
    chosen = [shares[index] for index in range(len(groups))]
    return CoreChoice(
        sum(share.l3_groups for share in chosen),
        sum(share.cores for share in chosen),
        sum(share.damage for share in chosen),
        tuple(taken for share in chosen for taken in share.taken),
    )


def _serve_across(
    supply: Supply, groups: Sequence[Sequence[Cell]], touched: Sequence[int]
) -> CoreChoice | None:
    """Share out evenly where L3 groups reach over several of the groups: the fewest of them first."""
    labels = sorted({cell.l3 for cells in groups for cell in cells})
    looked_at = 0
    for count in range(1, len(labels) + 1):
        best: CoreChoice | None = None
        for chosen in combinations(labels, count):
            looked_at += 1
            inside = [[cell for cell in cells if cell.l3 in chosen] for cells in groups]
            found = _serve_each(supply, inside, touched)
            if found is not None and (best is None or found.cores < best.cores):
                best = found
            if looked_at > MOST_CHOICES and best is not None:
                break
        if best is not None:
            return CoreChoice(count, best.cores, best.damage, best.taken)
    return None


def _must_be_touched(supply: Supply, region: _Region) -> list[int]:
    """The CPUs of each NUMA node, when not all of them would give a CPU without being told to.

    That is so only where the VM needs the node for its memory: no other region has a node too many.
    """
    parts = region.parts
    if not supply.needs_memory or not 1 < len(parts) <= supply.need:
        return []
    units = [supply.cell_units(c for c in p.cells if region.packages >> c.package & 1) for p in parts]
    if sum(units) - min(units) < supply.need:
        return []
    return [part.cpus for part in parts]


def _bins(supply: Supply, cells: Iterable[Cell]) -> list[Bin]:
    by_l3: dict[int, list[Cell]] = {}
    for cell in cells:
        by_l3.setdefault(cell.l3, []).append(cell)
    return [supply.bin(group) for group in by_l3.values()]


def _whole_pool(supply: Supply, region: _Region) -> CoreChoice:
    """Policy `numa`: all CPUs of the shared pool there, the less they are used by others the better."""
    taken = [Taken(core, core) for one in _bins(supply, region.cells) for core, _ in one.cores]
    cpus = [cpu for one in taken for cpu in cpus_of(one.cpus)]
    load = sum(supply.uses.get(cpu, 0) for cpu in cpus)
    return CoreChoice(0, 0, load * 1000 // len(cpus), tuple(taken))


def _weighed(supply: Supply, region: _Region, choice: CoreChoice) -> tuple[tuple[int, ...], Seat]:
    cpus = owned = 0
    for taken in choice.taken:
        cpus |= taken.cpus
        owned |= taken.core if supply.smt is not Smt.PREFER else taken.cpus
    damage = choice.damage if not supply.request.owns_cpus else 0
    free = supply.free.cpus
    lost = 0
    for part in region.parts:
        lost += _lost(free & part.cpus, owned)
    for cell in region.cells:
        if cell.cpus & owned:
            lost += _lost(free & cell.cpus, owned)
    key = (choice.l3_groups, choice.cores, damage, lost, *cpus_of(cpus))
    nodes = tuple(part.node for part in region.parts)
    return key, Seat(nodes, choice.taken)


def _lost(free: int, owned: int) -> int:
    return slots_lost(free.bit_count(), (free & ~owned).bit_count())
