"""The sets of NUMA nodes that serve a request best, found by counting alone.

The best sets have the fewest packages, then the fewest NUMA nodes, then the smallest distances between these.
No choice of cores on the machine can be better in these objectives. A node that gives memory alone counts
like any other; where it lies in several packages, one of them counts.

Of a set with more nodes than the CPUs need, those give CPUs that are the best set for the CPUs by the same
order, and of equal ones those with the most memory. Where the scope spreads, as many groups give CPUs as can
give equal shares.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from kvplace.core.allocator.layout import NodePart, ScopeDomain, Segment
from kvplace.core.allocator.nearest_nodes import NodeSets, SizedPart
from kvplace.core.allocator.set_cover import covers, fewest
from kvplace.core.allocator.supply import Supply
from kvplace.core.cpuset import bits_of, mask_of, union
from kvplace.core.request import Level, Policy

_MOST_PACKAGES_OF_NODES = 64
"""Sets of packages of the same NUMA nodes that are searched, where packages and NUMA nodes cross."""

Rank = tuple[int, int, int, int]
"""Packages, NUMA nodes, the largest and the summed distance between the nodes."""


@dataclass(frozen=True, slots=True)
class NumaSet:
    """NUMA nodes that serve the VM together, and the packages that it uses of them."""

    parts: tuple[NodePart, ...]
    """Those that may give CPUs."""
    packages: int
    domain: ScopeDomain
    alone: tuple[NodePart, ...] = ()
    """Those that give memory alone."""

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


def best_numa_sets(supply: Supply) -> list[NumaSet]:
    """Find all NUMA sets that can serve the VM and rank first, in the machine's order; none if none can.

    When the effort is spent it is those that rank first so far, or none.
    """
    best = _best_in(supply, supply.layout.domains[supply.request.options.scope.within])
    return best.numa_sets if best is not None else []


def giving_cpus(supply: Supply, numa_sets: list[NumaSet]) -> list[NumaSet]:
    """Let the nodes that lie best for the CPUs give these, in each set; keep the sets where they lie best.

    Of CPUs that lie equally well, those count that have most of the memory beside them. First come sets
    with the fewest CPUs left on other nodes, for later VMs that need the memory there.
    """
    if not supply.needs_memory or supply.request.options.policy is Policy.NUMA:
        return numa_sets
    if all(len(numa_set.parts) == 1 for numa_set in numa_sets):
        return numa_sets
    best: tuple[tuple[int, ...], list[NumaSet]] | None = None
    for numa_set in numa_sets:
        rank: tuple[int, ...]
        if supply.spreads:
            rank, narrowed = (-most_shares(group_units(supply, numa_set), supply.need),), [numa_set]
        else:
            rank, narrowed = _narrowed(supply, numa_set)
        for found in narrowed:
            far = 0 if supply.spreads else supply.far_bytes([part.node for part in found.parts])
            if best is None or (*rank, far) < best[0]:
                best = ((*rank, far), [found])
            elif (*rank, far) == best[0]:
                best[1].append(found)
    near = best[1] if best is not None else []
    return sorted(near, key=lambda numa_set: sum([supply.units(part) for part in numa_set.alone]))


def _narrowed(supply: Supply, numa_set: NumaSet) -> tuple[Rank, list[NumaSet]]:
    segments = [numa_set.segments_of(part) for part in numa_set.parts]
    units = [supply.segment_units(of_part) for of_part in segments]
    if sum(units) - min(units) < supply.need:
        return rank_of(supply, numa_set), [numa_set]
    parts = numa_set.parts
    if numa_set.domain.crossed:
        parts = tuple(map(_part_of, parts, segments))
    domain = replace(
        numa_set.domain,
        cpus=union(part.cpus for part in parts),
        parts=parts,
        crossed=any(part.packages & (part.packages - 1) for part in parts),
    )
    best = _best_in(supply.without_memory(), [domain])
    if best is None:  # the effort is spent
        return rank_of(supply, numa_set), [numa_set]
    return best.rank, [
        replace(found, alone=tuple([part for part in parts if part not in found.parts]))
        for found in best.numa_sets
    ]


def _part_of(part: NodePart, segments: Sequence[Segment]) -> NodePart:
    """The part of a node that these of its segments make up."""
    packages = mask_of(segment.package for segment in segments)
    cpus = union(segment.cpus for segment in segments)
    return replace(part, cpus=cpus, segments=tuple(segments), packages=packages)


def _best_in(supply: Supply, domains: Sequence[ScopeDomain]) -> _Best | None:
    if not any(domain.crossed for domain in domains) and (found := list(_single_nodes(supply, domains))):
        return _Best((1, 1, 0, 0), found)
    best: _Best | None = None
    for domain in domains:
        if supply.units_in(domain) >= supply.need:
            search = _across_packages if domain.crossed else _package_by_package
            best = search(supply, domain, best)
    return best


def rank_of(supply: Supply, numa_set: NumaSet) -> Rank:
    """Rank a NUMA set: smaller is better."""
    nodes = [part.node for part in (*numa_set.parts, *numa_set.alone)]
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
    scope = supply.request.options.scope
    if not scope.evenly:
        return [list(numa_set.segments)]
    if scope.level is Level.NUMA:
        return [list(numa_set.segments_of(part)) for part in numa_set.parts]
    groups: dict[int, list[Segment]] = {}
    for segment in numa_set.segments:
        groups.setdefault(segment.package, []).append(segment)
    return list(groups.values())


def _package_by_package(supply: Supply, domain: ScopeDomain, best: _Best | None) -> _Best | None:
    """Search where every NUMA node lies in one package: the packages first, then the nodes in them."""
    by_package: dict[int, list[SizedPart]] = {}
    for units, part in _useful(supply, domain):
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


def _useful(supply: Supply, domain: ScopeDomain) -> Iterator[SizedPart]:
    """Yield the parts that have something for the VM."""
    for part in domain.parts:
        units = supply.units(part)
        if units or any(amounts[0] for amounts, _ in supply.amounts_of([part.node])):
            yield units, part


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
    sized = list(_useful(supply, domain))
    parts = [part for _, part in sized]
    sets = NodeSets(supply, sized)
    packages = list(bits_of(mask_of_packages(parts)))
    nodes_of = [sum([part.packages >> package & 1 for part in parts]) for package in packages]
    in_packages = [([_units_of_package(supply, parts, package) for package in packages], supply.need)]
    for amounts, need in supply.amounts_of([part.node for part in parts]):
        of_packages = [
            sum([of_part for of_part, part in zip(amounts, parts, strict=True) if part.packages >> p & 1])
            for p in packages
        ]
        in_packages.append((of_packages, need))
    least = max([fewest(amounts, need) for amounts, need in in_packages])
    for sockets in range(least, len(packages) + 1):
        for count in range(sets.fewest, len(parts) + 1):
            if supply.effort.is_spent or (best is not None and (sockets, count) > best.rank[:2]):
                break
            if fewest(nodes_of, count) <= sockets:
                best = _nearest(supply, domain, sets, (sockets, count), best)
    return best


def _nearest(
    supply: Supply, domain: ScopeDomain, sets: NodeSets, size: tuple[int, int], best: _Best | None
) -> _Best | None:
    """Search the sets of one size, in packages and nodes; return them or the best so far."""
    sockets, count = size
    share = larger = package_share = 0
    if not domain.crossed and not supply.needs_memory and 1 < count <= supply.need:
        scope = supply.request.options.scope
        if scope.evenly and (scope.level is Level.NUMA or sockets == count):
            share, larger = divmod(supply.need, count)
        elif scope.evenly and sockets > 1:
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
    supply.effort.spend(len(parts))
    everything = list(bits_of(mask_of_packages(parts)))
    units = [_units_of_package(supply, parts, package) for package in everything]
    lies_in = [[part.packages >> package & 1 for package in everything] for part in parts]
    needs = [1] * len(parts)
    if supply.request.options.policy is Policy.NUMA:
        # Pools are used whole, and so is every package that has some of them.
        units = [int(bool(amount)) for amount in units]
        need = sum(units)
    else:
        need = supply.need
        if not supply.needs_memory:
            # Every node gives CPUs: no set has a node too many.
            of_parts = [supply.units_by_package(part) for part in parts]
            lies_in = [[of_part.get(package, 0) for package in everything] for of_part in of_parts]
            scope = supply.request.options.scope
            if scope.evenly and scope.level is Level.NUMA:
                needs = [supply.need // len(parts)] * len(parts)
    also = [*zip(lies_in, needs, strict=True)]
    yielded = 0
    kinds: Sequence[Hashable] = range(len(everything))
    if not supply.uses:
        kinds = [_kind(supply, parts, package) for package in everything]
    for chosen in covers(units, kinds, need, sockets, supply.effort, also=also):
        numa_set = NumaSet(parts, mask_of(everything[index] for index in chosen), domain)
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
                supply.l3_part((segment,)).kinds,
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


def _units_of_package(supply: Supply, parts: Iterable[NodePart], package: int) -> int:
    return sum([supply.units_by_package(part).get(package, 0) for part in parts])


def _spreads(supply: Supply, numa_set: NumaSet) -> bool:
    """Whether the need can be shared out evenly, where the scope asks for that."""
    return not supply.spreads or most_shares(group_units(supply, numa_set), supply.need) > 0


def group_units(supply: Supply, numa_set: NumaSet) -> list[int]:
    """The units of each group that the scope spreads over."""
    return [supply.segment_units(segments) for segments in spread_groups(supply, numa_set)]


def shares_exist(units: Sequence[int], count: int, need: int) -> bool:
    """Whether `count` of the groups, which have so many units, can give equal shares but for one unit."""
    low, over = divmod(need, count)
    ordered = sorted(units, reverse=True)
    return ordered[count - 1] >= low and (not over or ordered[over - 1] > low)


def most_shares(units: Sequence[int], need: int) -> int:
    """How many of the groups can give equal shares at most; 0 when no number of them can."""
    counts = range(min(need, len(units)), 0, -1)
    return next((count for count in counts if shares_exist(units, count, need)), 0)
