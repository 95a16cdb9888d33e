"""The sets of NUMA nodes that serve a request best, found by counting alone.

The best sets have the fewest packages, then the fewest NUMA nodes, then the smallest distances between these.
No choice of cores on the machine can be better in these objectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvplace.core.allocator.layout import NodePart, ScopeDomain, Segment
from kvplace.core.allocator.nearest_nodes import NodeSets, SizedPart
from kvplace.core.allocator.set_cover import covers, fewest
from kvplace.core.allocator.spreading import all_give, shares_exist
from kvplace.core.allocator.supply import Supply
from kvplace.core.cpuset import bits_of, mask_of
from kvplace.core.request import Policy, Scope

_MOST_PACKAGES_OF_NODES = 64
"""Sets of packages of the same NUMA nodes that are looked into, where packages and NUMA nodes cross."""

Rank = tuple[int, int, int, int]
"""Packages, NUMA nodes, the largest and the summed distance between the nodes."""


@dataclass(frozen=True, slots=True)
class NumaSet:
    """NUMA nodes that serve the VM together, and the packages that it uses of them."""

    parts: tuple[NodePart, ...]
    packages: int
    domain: ScopeDomain

    @property
    def segments(self) -> Iterator[Segment]:
        """The segments of the nodes in those packages."""
        for part in self.parts:
            yield from self.segments_of(part)

    def segments_of(self, part: NodePart) -> Sequence[Segment]:
        """The segments of one node in those packages."""
        if not self.domain.crossed:
            return part.segments
        return [segment for segment in part.segments if self.packages >> segment.package & 1]

    def units_of(self, supply: Supply, part: NodePart) -> int:
        """The units of one node in those packages."""
        if not self.domain.crossed:
            return supply.units(part)
        return supply.segment_units(self.segments_of(part))


def best_numa_sets(supply: Supply) -> list[NumaSet]:
    """Find all NUMA sets that can serve the VM and rank first, in the machine's order; none if none can.

    When the effort is spent it is those that rank first so far, or none.
    """
    domains = supply.layout.domains[supply.request.options.scope]
    if not any(domain.crossed for domain in domains) and (found := list(_single_nodes(supply, domains))):
        return found
    best: _Best | None = None
    for domain in domains:
        if supply.units_in(domain) >= supply.need:
            search = _across_packages if domain.crossed else _package_by_package
            best = search(supply, domain, best)
    return best.numa_sets if best is not None else []


def rank_of(supply: Supply, numa_set: NumaSet) -> Rank:
    """Rank a NUMA set: smaller is better."""
    nodes = [part.node for part in numa_set.parts]
    distances = [supply.layout.distances[one][other] for one, other in combinations(nodes, 2)]
    return (numa_set.packages.bit_count(), len(nodes), max(distances, default=0), sum(distances))


@dataclass(frozen=True, slots=True)
class _Best:
    """The NUMA sets that rank first so far."""

    rank: Rank
    numa_sets: list[NumaSet]


def _single_nodes(supply: Supply, domains: Iterable[ScopeDomain]) -> Iterator[NumaSet]:
    """Yield the NUMA nodes that serve the VM alone: where each lies in one package, they rank first."""
    for domain in domains:
        if supply.units_in(domain) < supply.need:
            continue
        for part in domain.parts:
            if supply.units(part) >= supply.need and supply.memory_fits((part.node,)):
                yield NumaSet((part,), part.packages, domain)


def spread_groups(supply: Supply, numa_set: NumaSet) -> list[list[Segment]]:
    """Group the segments of a NUMA set by what the scope spreads over; one group when it does not spread."""
    match supply.request.options.scope:
        case Scope.SPREAD_SOCKETS:
            groups: dict[int, list[Segment]] = {}
            for segment in numa_set.segments:
                groups.setdefault(segment.package, []).append(segment)
            return list(groups.values())
        case Scope.SPREAD_NUMA:
            return [list(numa_set.segments_of(part)) for part in numa_set.parts]
        case _:
            return [list(numa_set.segments)]


def _package_by_package(supply: Supply, domain: ScopeDomain, best: _Best | None) -> _Best | None:
    """Search where every NUMA node lies in one package: the packages first, then the nodes in them."""
    by_package: dict[int, list[SizedPart]] = {}
    for part in domain.parts:
        if units := supply.units(part):
            by_package.setdefault(part.packages, []).append((units, part))
    packages = list(by_package.values())
    if len(packages) > 1 and all(len(parts) == 1 for parts in packages):
        return _nodes_as_packages(supply, domain, [part for (part,) in packages], best)
    capacity = [sum([units for units, _ in parts]) for parts in packages]
    also = _amounts_of_packages(supply, packages)
    for count in range(fewest(capacity, supply.need), len(packages) + 1):
        if supply.effort.is_spent or (best is not None and count > best.rank[0]):
            break
        for chosen in covers(capacity, range(len(capacity)), supply.need, count, supply.effort, also=also):
            parts = [part for index in chosen for part in packages[index]]
            best = _in_packages(supply, domain, parts, count, best)
    return best


def _amounts_of_packages(
    supply: Supply, packages: Sequence[Sequence[SizedPart]]
) -> list[tuple[list[int], int]]:
    """Sum up memory and huge pages of each size by package, each with its need."""
    in_each = [supply.amounts_of([part.node for _, part in parts]) for parts in packages]
    return [
        ([sum(amounts[number][0]) for amounts in in_each], need)
        for number, (_, need) in enumerate(in_each[0])
    ]


def _nodes_as_packages(
    supply: Supply, domain: ScopeDomain, parts: Sequence[SizedPart], best: _Best | None
) -> _Best | None:
    """Search where every package is one NUMA node."""
    sets = NodeSets(supply, parts, a_package_each=True)
    for count in range(sets.fewest, len(parts) + 1):
        if supply.effort.is_spent or (best is not None and (count, count) > best.rank[:2]):
            break
        best = _nearest(supply, domain, sets, (count, count), best)
    return best


def _in_packages(
    supply: Supply, domain: ScopeDomain, parts: Sequence[SizedPart], sockets: int, best: _Best | None
) -> _Best | None:
    sets = NodeSets(supply, parts)
    for count in range(max(sockets, sets.fewest), len(parts) + 1):
        if supply.effort.is_spent or (best is not None and (sockets, count) > best.rank[:2]):
            break
        best = _nearest(supply, domain, sets, (sockets, count), best)
    return best


def _across_packages(supply: Supply, domain: ScopeDomain, best: _Best | None) -> _Best | None:
    """Search where NUMA nodes lie in several packages: the nodes first, then the packages in them."""
    parts = [part for part in domain.parts if supply.units(part)]
    sets = NodeSets(supply, [(supply.units(part), part) for part in parts])
    packages = list(bits_of(mask_of_packages(parts)))
    nodes_of = [sum([part.packages >> package & 1 for part in parts]) for package in packages]
    packages_of = sorted([part.packages.bit_count() for part in parts])
    also = [
        (
            [
                sum([of_part for of_part, part in zip(amounts, parts, strict=True) if part.packages >> p & 1])
                for p in packages
            ],
            need,
        )
        for amounts, need in supply.amounts_of([part.node for part in parts])
    ]
    least = max([_fewest_packages(supply, parts), *[fewest(amounts, need) for amounts, need in also]])
    for sockets in range(least, len(packages) + 1):
        for count in range(sets.fewest, len(parts) + 1):
            if supply.effort.is_spent or (best is not None and (sockets, count) > best.rank[:2]):
                break
            if count > supply.need:
                # All packages of the nodes count, since some nodes give memory alone.
                shared = -(-sum(packages_of[:count]) // max(nodes_of))
                if sockets < max(packages_of[count - 1], shared) or sockets > sum(packages_of[-count:]):
                    continue
            elif fewest(nodes_of, count) > sockets:
                continue
            best = _nearest(supply, domain, sets, (sockets, count), best)
    return best


def _nearest(
    supply: Supply, domain: ScopeDomain, sets: NodeSets, size: tuple[int, int], best: _Best | None
) -> _Best | None:
    """Search the sets of one size, in packages and nodes; return them or the best so far."""
    sockets, count = size
    share = larger = package_share = 0
    if not domain.crossed and count <= supply.need and count > 1:
        scope = supply.request.options.scope
        if scope is Scope.SPREAD_NUMA or (scope is Scope.SPREAD_SOCKETS and sockets == count):
            share, larger = divmod(supply.need, count)
        elif scope is Scope.SPREAD_SOCKETS and sockets > 1:
            package_share = supply.need // sockets

    def numa_sets_of(members: tuple[NodePart, ...]) -> Iterable[NumaSet]:
        if domain.crossed:
            return _choose_packages(supply, domain, members, sockets)
        packages = mask_of_packages(members)
        numa_set = NumaSet(members, packages, domain)
        return [numa_set] if packages.bit_count() == sockets and (share or _spreads(supply, numa_set)) else []

    within = best.rank[2:] if best is not None and best.rank[:2] == size else None
    found = sets.nearest(
        count, numa_sets_of, within=within, share=share, larger=larger, package_share=package_share
    )
    if found is None:
        return best
    distances, numa_sets = found
    rank = (*size, *distances)
    return _Best(rank, best.numa_sets + numa_sets if best is not None and best.rank == rank else numa_sets)


def _choose_packages(
    supply: Supply, domain: ScopeDomain, parts: tuple[NodePart, ...], sockets: int
) -> Iterator[NumaSet]:
    """Yield the NUMA sets of these nodes with so many packages."""
    everything = mask_of_packages(parts)
    supply.effort.spend(len(parts))
    pools = supply.request.options.policy is Policy.NUMA
    if pools or len(parts) > supply.need:
        # There is no choice: pools are used whole, or some of the nodes give memory alone.
        used = mask_of(p for p in bits_of(everything) if _units_of_package(supply, parts, p))
        numa_set = NumaSet(parts, used if pools else everything, domain)
        if numa_set.packages.bit_count() == sockets and _spreads(supply, numa_set):
            yield numa_set
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
    supply.effort.spend(len(parts) * (1 + len(numbers)))
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
    for chosen in covers(units, kinds, supply.need, sockets, supply.effort, also=also):
        numa_set = NumaSet(parts, mask_of(numbers[index] for index in chosen), domain)
        if _spreads(supply, numa_set):
            yielded += 1
            yield numa_set
            if yielded >= _MOST_PACKAGES_OF_NODES:
                return


def _kind(supply: Supply, parts: Sequence[NodePart], package: int) -> Hashable:
    """Packages of one kind differ in ids alone."""
    segments = [segment for part in parts for segment in part.segments if segment.package == package]
    return tuple(
        sorted(
            (
                segment.node,
                supply.l3_part((segment,)).widths,
                (supply.free.cpus & segment.cpus).bit_count(),
                segment.shared_l3,
            )
            for segment in segments
        )
    )


def mask_of_packages(parts: Iterable[NodePart]) -> int:
    """The packages that parts lie in, by their index."""
    mask = 0
    for part in parts:
        mask |= part.packages
    return mask


def _fewest_packages(supply: Supply, parts: Sequence[NodePart]) -> int:
    packages = bits_of(mask_of_packages(parts))
    return fewest([_units_of_package(supply, parts, package) for package in packages], supply.need)


def _units_of_package(supply: Supply, parts: Iterable[NodePart], package: int) -> int:
    return sum([supply.units_by_package(part).get(package, 0) for part in parts])


def _spreads(supply: Supply, numa_set: NumaSet) -> bool:
    """Whether the need can be shared out evenly, where the scope asks for that."""
    if not supply.spreads:
        return True
    if len(numa_set.parts) > supply.need:
        # The VM uses the others for their memory alone.
        units = [supply.segment_units(segments) for segments in spread_groups(supply, numa_set)]
        most = min(supply.need, len(units))
        return any(shares_exist(units, count, supply.need) for count in range(1, most + 1))
    if not numa_set.domain.crossed:
        return _spreads_over(*_sizes_of_groups(supply, numa_set), supply.need)
    groups = spread_groups(supply, numa_set)
    units = [supply.segment_units(segments) for segments in groups]
    nodes = [{segment.node for segment in segments} for segments in groups]
    homes = [[index for index, of in enumerate(nodes) if part.node in of] for part in numa_set.parts]
    return all_give(units, homes, supply.need) is not None


def _sizes_of_groups(supply: Supply, numa_set: NumaSet) -> tuple[list[int], list[int]]:
    """The units of each group that the scope spreads over, and how many NUMA nodes it is."""
    units: dict[int, int] = {}
    nodes: dict[int, int] = {}
    for part in numa_set.parts:
        group = part.packages if supply.request.options.scope is Scope.SPREAD_SOCKETS else part.node
        units[group] = units.get(group, 0) + supply.units(part)
        nodes[group] = nodes.get(group, 0) + 1
    return list(units.values()), list(nodes.values())


def _spreads_over(units: Sequence[int], nodes: Sequence[int], need: int) -> bool:
    """Whether groups of so many units and NUMA nodes can give equal shares, with a unit of each node."""
    low, over = divmod(need, len(units))
    if len(units) > 1 and (min(units) < low or sum([amount > low for amount in units]) < over):
        return False
    larger = [count > low for count in nodes]
    return (
        max(nodes) <= low + 1
        and sum(larger) <= over
        and all(amount > low for amount, more in zip(units, larger, strict=True) if more)
    )
