"""The sets of NUMA nodes that serve a request best, found by counting alone.

A region that comes first has the fewest sockets, then the fewest NUMA nodes, then the smallest distances
between them: no other choice of cores on the machine can be better in these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from kvplace.core.allocator.covering import covers
from kvplace.core.allocator.layout import Cell, Domain, NodePart
from kvplace.core.allocator.node_sets import NodeSets, SizedPart
from kvplace.core.allocator.supply import Supply, fewest
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.request import Policy, Scope

MOST_REGIONS = 64
"""Equally good regions that are worth a look inside."""

_MOST_PACKAGE_SETS = 2_000
"""Sets of packages with several NUMA nodes each that are looked at once one of them serves: it takes fourteen
packages to have more, and costs nearness at most."""

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
    domains = supply.layout.domains[supply.request.options.scope]
    if not any(domain.crossed for domain in domains) and (found := list(_single_nodes(supply, domains))):
        return found
    best: _Best | None = None
    for domain in domains:
        if supply.units_in(domain) >= supply.need:
            search = _across_packages if domain.crossed else _package_by_package
            best = search(supply, domain, best)
    return best.regions if best is not None else []


@dataclass(frozen=True, slots=True)
class _Best:
    """The regions that rank first so far."""

    rank: Rank
    regions: list[Region]


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
    match supply.request.options.scope:
        case Scope.SPREAD_SOCKETS:
            groups: dict[int, list[Cell]] = {}
            for cell in region.cells:
                groups.setdefault(cell.package, []).append(cell)
            return list(groups.values())
        case Scope.SPREAD_NUMA:
            return [list(region.cells_of(part)) for part in region.parts]
        case _:
            return [list(region.cells)]


def _package_by_package(supply: Supply, domain: Domain, best: _Best | None) -> _Best | None:
    """Search where every NUMA node lies in one package: the packages first, then the nodes in them."""
    by_package: dict[int, list[SizedPart]] = {}
    for part in domain.parts:
        if units := supply.units(part):
            by_package.setdefault(part.packages, []).append((units, part))
    packages = list(by_package.values())
    if len(packages) > 1 and all(len(parts) == 1 for parts in packages):
        return _nodes_as_packages(supply, domain, [part for (part,) in packages], best)
    room = [sum([units for units, _ in parts]) for parts in packages]
    also = _amounts_of_packages(supply, packages)
    for count in range(fewest(room, supply.need), len(packages) + 1):
        if best is not None and count > best.rank[0]:
            break
        for number, chosen in enumerate(covers(room, range(len(room)), supply.need, count, also=also)):
            if number >= _MOST_PACKAGE_SETS and best is not None and best.rank[0] == count:
                break
            parts = [part for index in chosen for part in packages[index]]
            best = _in_packages(supply, domain, parts, count, best)
    return best


def _amounts_of_packages(
    supply: Supply, packages: Sequence[Sequence[SizedPart]]
) -> list[tuple[list[int], int]]:
    """What packages have of memory and of each size of huge pages, with the need of it."""
    in_each = [supply.amounts_of([part.node for _, part in parts]) for parts in packages]
    return [
        ([sum(amounts[number][0]) for amounts in in_each], need)
        for number, (_, need) in enumerate(in_each[0])
    ]


def _nodes_as_packages(
    supply: Supply, domain: Domain, parts: Sequence[SizedPart], best: _Best | None
) -> _Best | None:
    """Search where every package is one NUMA node."""
    sets = NodeSets(supply, parts, a_package_each=True)
    for count in range(sets.fewest, len(parts) + 1):
        if best is not None and (count, count) > best.rank[:2]:
            break
        best = _nearest(supply, domain, sets, (count, count), best)
    return best


def _in_packages(
    supply: Supply, domain: Domain, parts: Sequence[SizedPart], sockets: int, best: _Best | None
) -> _Best | None:
    sets = NodeSets(supply, parts)
    for count in range(max(sockets, sets.fewest), len(parts) + 1):
        if best is not None and (sockets, count) > best.rank[:2]:
            break
        best = _nearest(supply, domain, sets, (sockets, count), best)
    return best


def _across_packages(supply: Supply, domain: Domain, best: _Best | None) -> _Best | None:
    """Search where NUMA nodes lie in several packages: the nodes first, then the packages in them."""
    parts = [part for part in domain.parts if supply.units(part)]
    sets = NodeSets(supply, [(supply.units(part), part) for part in parts])
    packages = mask_of_packages(parts).bit_count()
    for sockets in range(_fewest_packages(supply, parts), packages + 1):
        for count in range(sets.fewest, len(parts) + 1):
            if best is not None and (sockets, count) > best.rank[:2]:
                break
            best = _nearest(supply, domain, sets, (sockets, count), best)
    return best


def _nearest(
    supply: Supply, domain: Domain, sets: NodeSets, size: tuple[int, int], best: _Best | None
) -> _Best | None:
    """Search the sets of one size, in sockets and nodes; what they find is added to the best, or instead."""
    sockets, count = size
    share = larger = package_share = 0
    if not domain.crossed and count <= supply.need and count > 1:
        scope = supply.request.options.scope
        if scope is Scope.SPREAD_NUMA or (scope is Scope.SPREAD_SOCKETS and sockets == count):
            share, larger = divmod(supply.need, count)
        elif scope is Scope.SPREAD_SOCKETS and sockets > 1:
            package_share = supply.need // sockets

    def regions_of(members: tuple[NodePart, ...]) -> Iterable[Region]:
        if domain.crossed:
            return _choose_packages(supply, domain, members, sockets)
        packages = mask_of_packages(members)
        region = Region(members, packages, domain)
        return [region] if packages.bit_count() == sockets and (share or _spreads(supply, region)) else []

    within = best.rank[2:] if best is not None and best.rank[:2] == size else None
    found = sets.nearest(
        count, regions_of, within=within, share=share, larger=larger, package_share=package_share
    )
    if found is None:
        return best
    distances, regions = found
    rank = (*size, *distances)
    return _Best(rank, best.regions + regions if best is not None and best.rank == rank else regions)


def _choose_packages(
    supply: Supply, domain: Domain, parts: tuple[NodePart, ...], sockets: int
) -> Iterator[Region]:
    """Yield the regions with so many packages in NUMA nodes."""
    everything = mask_of_packages(parts)
    pools = supply.request.options.policy is Policy.NUMA
    if pools or len(parts) > supply.need:
        # Without a choice: the whole pools are used, or some of the nodes give memory alone.
        used = mask_of(p for p in cpus_of(everything) if _units_of_package(supply, parts, p))
        region = Region(parts, used if pools else everything, domain)
        if region.packages.bit_count() == sockets and _spreads(supply, region):
            yield region
        return
    share, larger, per_package, larger_packages = 1, 0, 1, 0
    match supply.request.options.scope:
        case Scope.SPREAD_NUMA:
            share, larger = divmod(supply.need, len(parts))
        case Scope.SPREAD_SOCKETS:
            per_package, larger_packages = divmod(supply.need, sockets)
    of_parts = [supply.units_by_package(part) for part in parts]
    of_packages = Counter[int]()
    for of_part in of_parts:
        of_packages.update(of_part)
    numbers = sorted([package for package, amount in of_packages.items() if amount >= per_package])
    units = [of_packages[package] for package in numbers]
    inside = [[of_part.get(package, 0) for package in numbers] for of_part in of_parts]
    least = [fewest(of_part, share) for of_part in inside]
    more = sorted([fewest(of_part, share + 1) - count for of_part, count in zip(inside, least, strict=True)])
    nodes = max([sum(map(bool, of_package)) for of_package in zip(*inside, strict=True)], default=0)
    if len(numbers) < sockets or sum(least) + sum(more[:larger]) > sockets * nodes:
        return
    also = [(of_part, share) for of_part in inside]
    also.append(([int(amount > per_package) for amount in units], larger_packages))
    yielded = 0
    kinds = range(len(numbers)) if supply.uses else [_kind(supply, parts, number) for number in numbers]
    for chosen in covers(units, kinds, supply.need, sockets, also=also):
        region = Region(parts, mask_of(numbers[index] for index in chosen), domain)
        if _spreads(supply, region):
            yielded += 1
            yield region
            if yielded >= MOST_REGIONS:
                return


def _kind(supply: Supply, parts: Sequence[NodePart], package: int) -> Hashable:
    """Packages of one kind differ in ids alone."""
    cells = [cell for part in parts for cell in part.cells if cell.package == package]
    layout = supply.layout
    return tuple(
        sorted(
            (
                cell.node,
                supply.bin((cell,)).widths,
                (supply.free.cpus & cell.cpus).bit_count(),
                layout.shared_l3_groups((cell,)),
            )
            for cell in cells
        )
    )


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
    if not region.domain.crossed:
        units, nodes = _sizes_of_groups(supply, region)
        if len(region.parts) > supply.need:
            return _some_spread(units, supply.need)
        return _spreads_over(units, nodes, supply.need)
    groups = spread_groups(supply, region)
    units = [supply.cell_units(cells) for cells in groups]
    if len(region.parts) > supply.need:
        return _some_spread(units, supply.need)
    return any(
        _spreads_over(units, [len(touched) for touched in plan], supply.need)
        for plan in touch_plans(region, groups)
    )


def _sizes_of_groups(supply: Supply, region: Region) -> tuple[list[int], list[int]]:
    """The units of each group that the scope spreads over, and how many NUMA nodes it is."""
    units: dict[int, int] = {}
    nodes: dict[int, int] = {}
    for part in region.parts:
        group = part.packages if supply.request.options.scope is Scope.SPREAD_SOCKETS else part.node
        units[group] = units.get(group, 0) + supply.units(part)
        nodes[group] = nodes.get(group, 0) + 1
    return list(units.values()), list(nodes.values())


def _some_spread(units: Sequence[int], need: int) -> bool:
    """Whether any of the groups can give equal shares: the VM uses the others for their memory alone."""
    ordered = sorted(units, reverse=True)
    for count in range(1, min(need, len(ordered)) + 1):
        low, over = divmod(need, count)
        if ordered[count - 1] >= low and (not over or ordered[over - 1] > low):
            return True
    return False


def _spreads_over(units: Sequence[int], touched: Sequence[int], need: int) -> bool:
    """Whether groups of so many units can give equal shares, each at least as many as it must touch nodes."""
    low, over = divmod(need, len(units))
    if len(units) > 1 and (min(units) < low or sum([amount > low for amount in units]) < over):
        return False
    larger = [count > low for count in touched]
    return (
        max(touched) <= low + 1
        and sum(larger) <= over
        and all(amount > low for amount, more in zip(units, larger, strict=True) if more)
    )


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
