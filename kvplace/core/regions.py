"""The sets of NUMA nodes that serve a request best, found by counting alone.

A region that comes first has the fewest sockets, then the fewest NUMA nodes, then the smallest distances
between them: no other choice of cores on the machine can be better in these.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product

from kvplace.core.core_choice import covers
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.layout import Cell, Domain, NodePart
from kvplace.core.request import Policy, Scope
from kvplace.core.supply import Supply, fewest

MOST_REGIONS = 64
"""Equally good regions that are worth a look inside."""

MOST_SETS = 2_000
"""Sets of one size that are looked at; reached where there are many NUMA nodes, none like another."""

Rank = tuple[int, int, int, int]
"""Sockets, NUMA nodes, the largest and the summed distance between them."""


@dataclass(frozen=True, slots=True)
class Region:
    """NUMA nodes that serve the VM together, and the packages of them that it uses."""

    parts: tuple[NodePart, ...]
    packages: int
    domain: Domain

    @property
    def cells(self) -> Iterator[Cell]:
        """The cells of the nodes in those packages."""
        for part in self.parts:
            yield from self.cells_of(part)

    def cells_of(self, part: NodePart) -> Sequence[Cell]:
        """The cells of one node in those packages."""
        if not self.domain.crossed:
            return part.cells
        return [cell for cell in part.cells if self.packages >> cell.package & 1]

    def units_of(self, supply: Supply, part: NodePart) -> int:
        """The units of one node in those packages."""
        if not self.domain.crossed:
            return supply.units(part)
        return supply.cell_units(self.cells_of(part))


def best_regions(supply: Supply) -> list[Region]:
    """Find all regions that can serve the VM and rank first, in the machine's order; none if none can."""
    domains = supply.layout.domains[supply.request.scope]
    if not any(domain.crossed for domain in domains) and (found := list(_single_nodes(supply, domains))):
        return found
    best: Rank | None = None
    regions: list[Region] = []
    for domain in domains:
        if supply.units_in(domain) < supply.need:
            continue
        search = _across_packages if domain.crossed else _package_by_package
        for rank, region in search(supply, domain, best):
            if best is None or rank < best:
                best, regions = rank, [region]
            elif rank == best:
                regions.append(region)
    return regions


def _single_nodes(supply: Supply, domains: Iterable[Domain]) -> Iterator[Region]:
    """Yield the NUMA nodes that serve the VM alone: where each lies in one package, nothing ranks first."""
    for domain in domains:
        if supply.units_in(domain) < supply.need:
            continue
        for part in domain.parts:
            if supply.units(part) >= supply.need and supply.memory_fits((part.node,)):
                yield Region((part,), part.packages, domain)


def spread_groups(supply: Supply, region: Region) -> list[list[Cell]]:
    """The cells of a region by what the scope spreads over; all in one group when it does not spread."""
    match supply.request.scope:
        case Scope.SPREAD_SOCKETS:
            groups: dict[int, list[Cell]] = {}
            for cell in region.cells:
                groups.setdefault(cell.package, []).append(cell)
            return list(groups.values())
        case Scope.SPREAD_NUMA:
            return [list(region.cells_of(part)) for part in region.parts]
        case _:
            return [list(region.cells)]


def _package_by_package(supply: Supply, domain: Domain, best: Rank | None) -> Iterator[tuple[Rank, Region]]:
    """Search where every NUMA node lies in one package: the packages first, then the nodes in them."""
    by_package: dict[int, list[NodePart]] = {}
    for part in domain.parts:
        if supply.units(part):
            by_package.setdefault(part.packages, []).append(part)
    packages = list(by_package)
    units = [sum(supply.units(part) for part in parts) for parts in by_package.values()]
    for count in range(fewest(units, supply.need), len(packages) + 1):
        if best is not None and count > best[0]:
            return
        for chosen in islice(covers(units, range(len(units)), supply.need, count), MOST_SETS):
            parts = [part for index in chosen for part in by_package[packages[index]]]
            parts.sort(key=lambda part: part.node)
            mask = sum(packages[index] for index in chosen)
            for rank, region in _in_packages(supply, domain, parts, mask, best):
                best = rank if best is None or rank < best else best
                yield rank, region


def _in_packages(
    supply: Supply, domain: Domain, parts: Sequence[NodePart], packages: int, best: Rank | None
) -> Iterator[tuple[Rank, Region]]:
    sockets = packages.bit_count()
    for count in range(max(sockets, _fewest_nodes(supply, parts)), len(parts) + 1):
        if best is not None and (sockets, count) > best[:2]:
            return
        found = False
        for members in _node_sets(supply, parts, count):
            rank = (sockets, *_distances(supply, members))
            if best is not None and rank > best:
                continue
            region = Region(members, packages, domain)
            if sockets > 1 and mask_of_packages(members) != packages:
                continue
            if _spreads(supply, region):
                found = True
                best = rank
                yield rank, region
        if found:
            return


def _across_packages(supply: Supply, domain: Domain, best: Rank | None) -> Iterator[tuple[Rank, Region]]:
    """Search where NUMA nodes lie in several packages: the nodes first, then the packages in them."""
    parts = [part for part in domain.parts if supply.units(part)]
    fewest_packages = _fewest_packages(supply, parts)
    for count in range(_fewest_nodes(supply, parts), len(parts) + 1):
        if best is not None and (fewest_packages, count) > best[:2]:
            return
        for members in _node_sets(supply, parts, count):
            nodes_rank = _distances(supply, members)
            for region in _choose_packages(supply, domain, members, nodes_rank, best):
                rank = (region.packages.bit_count(), *nodes_rank)
                best = rank if best is None or rank < best else best
                yield rank, region
        if best is not None and best[0] <= fewest_packages:
            return


def _choose_packages(
    supply: Supply,
    domain: Domain,
    parts: tuple[NodePart, ...],
    nodes_rank: tuple[int, int, int],
    best: Rank | None,
) -> Iterator[Region]:
    """Yield the regions with the fewest packages in NUMA nodes."""
    everything = mask_of_packages(parts)
    if supply.request.policy is Policy.NUMA or len(parts) > supply.need:
        # Without a choice: the whole pools are used, or some of the nodes give memory alone.
        packages = mask_of(p for p in cpus_of(everything) if _units_of_package(supply, parts, p))
        region = Region(parts, everything if len(parts) > supply.need else packages, domain)
        if _spreads(supply, region):
            yield region
        return
    numbers = list(cpus_of(everything))
    units = [_units_of_package(supply, parts, package) for package in numbers]
    for count in range(fewest(units, supply.need), len(numbers) + 1):
        if best is not None and (count, *nodes_rank) > best:
            return
        found = False
        for number, chosen in enumerate(covers(units, range(len(units)), supply.need, count)):
            region = Region(parts, mask_of(numbers[index] for index in chosen), domain)
            if all(region.units_of(supply, part) for part in parts) and _spreads(supply, region):
                found = True
                yield region
            if number >= MOST_REGIONS and found:
                break
        if found:
            return


def _node_sets(supply: Supply, parts: Sequence[NodePart], count: int) -> Iterator[tuple[NodePart, ...]]:
    """Yield the sets of so many parts that have the units and the memory, in the machine's order."""
    if count == 1:
        for part in parts:
            if supply.units(part) >= supply.need and supply.memory_fits((part.node,)):
                yield (part,)
        return
    units = [supply.units(part) for part in parts]
    kinds = range(len(parts)) if supply.uses else [_kind(supply, part) for part in parts]
    also = supply.amounts_of([part.node for part in parts])
    for chosen in islice(covers(units, kinds, supply.need, count, also=also), MOST_SETS):
        yield tuple(parts[index] for index in chosen)


def _kind(supply: Supply, part: NodePart) -> Hashable:
    """Parts of one kind differ in ids alone: of sets that do not differ otherwise one is enough."""
    layout = supply.layout
    return (
        layout.twins[part.node],
        part.packages,
        supply.count(part).kind,
        (supply.free.cpus & part.cpus).bit_count(),
        tuple(amounts[0] for amounts, _ in supply.amounts_of([part.node])),
        layout.shared_l3_groups(part),
    )


def _fewest_nodes(supply: Supply, parts: Sequence[NodePart]) -> int:
    """How many of the parts it takes at least; more than there are when all do not suffice."""
    nodes = [part.node for part in parts]
    if not supply.memory_fits(nodes):
        return len(parts) + 1
    by_units = fewest([supply.units(part) for part in parts], supply.need)
    return max(by_units, supply.fewest_nodes_for_memory(nodes))


def _distances(supply: Supply, parts: Sequence[NodePart]) -> tuple[int, int, int]:
    if len(parts) == 1:
        return (1, 0, 0)
    distances = supply.layout.distances
    pairs = [distances[a.node][b.node] for a, b in combinations(parts, 2)]
    return (len(parts), max(pairs), sum(pairs))


def mask_of_packages(parts: Iterable[NodePart]) -> int:
    """The packages that parts lie in, by their index."""
    mask = 0
    for part in parts:
        mask |= part.packages
    return mask


def _fewest_packages(supply: Supply, parts: Sequence[NodePart]) -> int:
    packages = cpus_of(mask_of_packages(parts))
    return fewest([_units_of_package(supply, parts, package) for package in packages], supply.need)


def _units_of_package(supply: Supply, parts: Iterable[NodePart], package: int) -> int:
    return supply.cell_units(cell for part in parts for cell in part.cells if cell.package == package)


def _spreads(supply: Supply, region: Region) -> bool:
    """Whether the need can be shared out evenly, where the scope asks for that."""
    if not supply.spreads:
        return True
    groups = spread_groups(supply, region)
    if len(groups) == 1 or len(region.parts) > supply.need:
        return True
    low, over = divmod(supply.need, len(groups))
    units = [supply.cell_units(cells) for cells in groups]
    if min(units) < low or sum(1 for amount in units if amount > low) < over:
        return False
    for plan in touch_plans(region, groups):
        nodes = [len(touched) for touched in plan]
        larger = [count > low for count in nodes]
        if (
            max(nodes) <= low + 1
            and sum(larger) <= over
            and all(amount > low for amount, more in zip(units, larger, strict=True) if more)
        ):
            return True
    return False


def touch_plans(region: Region, groups: Sequence[Sequence[Cell]]) -> Iterator[list[list[int]]]:
    """Yield every way in which each NUMA node of a region gives a CPU to one of the groups of its cells.

    A way says for each group the CPUs of which nodes must be touched there. There is one way where levels
    do not cross.
    """
    homes = [
        [index for index, cells in enumerate(groups) if any(cell.node == part.node for cell in cells)]
        for part in region.parts
    ]
    for chosen in islice(product(*homes), MOST_REGIONS):
        plan: list[list[int]] = [[] for _ in groups]
        for part, home in zip(region.parts, chosen, strict=True):
            plan[home].append(part.cpus)
        yield plan
