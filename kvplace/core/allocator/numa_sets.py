"""The sets of NUMA nodes that serve a request best, found by counting alone.

The best sets have the smallest `NodeRank`. No choice of cores on the machine can be better in these
objectives. A node that gives memory alone counts like any other; where it lies in several sockets, one of
them counts.

Where a set has more nodes than the CPUs need, only some give CPUs: the best subset for the CPUs by the same
order, and of equal subsets the one with the most memory. Where the scope spreads, as many groups give CPUs as
can give equal shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from kvplace.core.allocator.available_units import AvailableUnits
from kvplace.core.allocator.layout import NodePart, ScopeDomain, Segment
from kvplace.core.allocator.nearest_nodes import NodeSets, SizedPart
from kvplace.core.allocator.objectives import NodeRank
from kvplace.core.allocator.set_cover import covers, fewest
from kvplace.core.cpuset import union
from kvplace.core.request import Level, Policy
from kvplace.core.scalars import NumaIndex


@dataclass(frozen=True, slots=True)
class NumaSet:
    """Parts of NUMA nodes that serve the VM together."""

    parts: tuple[NodePart, ...]
    """Parts that may give CPUs."""
    domain: ScopeDomain
    alone: tuple[NodePart, ...] = ()
    """Parts that give memory alone."""
    beside: tuple[frozenset[NumaIndex], ...] = ()
    """Of each of these sets of NUMA nodes, which have devices, one gives a CPU."""

    @property
    def segments(self) -> Iterator[Segment]:
        """The segments of the parts that may give CPUs."""
        for part in self.parts:
            yield from part.segments

    @property
    def nodes(self) -> tuple[NumaIndex, ...]:
        """The NUMA nodes, by their index."""
        nodes = [part.node for part in (*self.parts, *self.alone)]
        return tuple(dict.fromkeys(nodes)) if self.domain.divides_nodes else tuple(nodes)


def best_numa_sets(available: AvailableUnits) -> list[NumaSet]:
    """Find all NUMA sets that can serve the VM and rank first, in the machine's order; none if none can.

    When the budget is spent, the list has the best set so far, or none.
    """
    best = _best_in(available, available.layout.domains[available.request.options.scope.within])
    return best.numa_sets if best is not None else []


def giving_cpus(available: AvailableUnits, numa_sets: list[NumaSet]) -> list[NumaSet]:
    """Choose in each set the nodes that give CPUs; keep the sets with the best CPUs.

    Of equally good CPUs the ones with the most memory beside them count. Sets that leave the fewest CPUs on
    other nodes come first: later VMs need the memory there.
    """
    if not available.needs_memory or available.request.options.policy is Policy.NUMA:
        return numa_sets
    if all(len(numa_set.parts) == 1 for numa_set in numa_sets):
        return numa_sets
    best: tuple[tuple[int, ...], list[NumaSet]] | None = None
    for numa_set in numa_sets:
        rank: tuple[int, ...]
        if available.spreads:
            rank, narrowed = (-most_shares_of(available, numa_set),), [numa_set]
        else:
            rank, narrowed = _narrowed(available, numa_set)
        for found in narrowed:
            far = 0 if available.spreads else available.far_bytes({part.node for part in found.parts})
            if best is None or (*rank, far) < best[0]:
                best = ((*rank, far), [found])
            elif (*rank, far) == best[0]:
                best[1].append(found)
    near = best[1] if best is not None else []
    return sorted(near, key=lambda numa_set: sum([available.units(part) for part in numa_set.alone]))


def _narrowed(available: AvailableUnits, numa_set: NumaSet) -> tuple[NodeRank, list[NumaSet]]:
    parts = numa_set.parts
    units = [available.units(part) for part in parts]
    if sum(units) - min(units) < available.need:
        return rank_of(available, numa_set), [numa_set]
    domain = replace(numa_set.domain, cpus=union(part.cpus for part in parts), parts=parts)
    best = _best_in(available.without_memory(numa_set.beside), [domain])
    if best is None:  # the budget is spent
        return rank_of(available, numa_set), [numa_set]
    return best.rank, [
        replace(found, alone=tuple([part for part in parts if part not in found.parts]))
        for found in best.numa_sets
    ]


def rank_of(available: AvailableUnits, numa_set: NumaSet) -> NodeRank:
    """Rank a NUMA set: smaller is better."""
    nodes = numa_set.nodes
    distances = [available.layout.distances[one][other] for one, other in combinations(nodes, 2)]
    sockets = {part.socket for part in (*numa_set.parts, *numa_set.alone)}
    far = next(
        (far for far, beside in available.device_choices if available.is_beside(numa_set.parts, beside)), 0
    )
    return NodeRank(len(sockets), len(nodes), far, max(distances, default=0), sum(distances))


@dataclass(frozen=True, slots=True)
class _BestSets:
    """The NUMA sets that rank first so far."""

    rank: NodeRank
    numa_sets: list[NumaSet]


def _best_in(available: AvailableUnits, domains: Sequence[ScopeDomain]) -> _BestSets | None:
    best: _BestSets | None = None
    for far, beside in available.device_choices:
        if best is not None and far > best.rank.far_devices:
            break
        if found := list(_single_parts(available, domains, beside)):
            best = _BestSets(
                NodeRank(1, 1, far, 0, 0), [*best.numa_sets, *found] if best is not None else found
            )
    if best is not None:
        return best
    for domain in domains:
        if available.units_in(domain) >= available.need:
            search = _sockets_in_nodes if domain.divides_nodes else _nodes_in_sockets
            best = search(available, domain, best)
    return best


def _single_parts(
    available: AvailableUnits, domains: Iterable[ScopeDomain], beside: tuple[frozenset[NumaIndex], ...]
) -> Iterator[NumaSet]:
    """Yield the parts of NUMA nodes that serve the VM alone: nothing ranks before them."""
    for domain in domains:
        if available.units_in(domain) < available.need:
            continue
        for part in domain.parts:
            if available.units(part) >= available.need and available.memory_fits((part.node,)):
                numa_set = NumaSet((part,), domain, beside=beside)
                if serves(available, numa_set):
                    yield numa_set


def serves(available: AvailableUnits, numa_set: NumaSet) -> bool:
    """Whether a NUMA set with enough of everything serves the VM: with equal shares, with whole pools."""
    if not available.is_beside(numa_set.parts, numa_set.beside):
        return False
    if available.spreads and not most_shares_of(available, numa_set):
        return False
    if numa_set.domain.divides_nodes:
        nodes = numa_set.nodes
        if not available.memory_fits(nodes):
            return False
        if available.request.options.policy is Policy.NUMA:
            others = (part for part in numa_set.domain.parts if part not in numa_set.parts)
            return not any(part.node in nodes and available.units(part) for part in others)
    return True


def spread_groups(available: AvailableUnits, numa_set: NumaSet) -> list[list[Segment]]:
    """Group the segments of a NUMA set by the level that the scope spreads over; else one group."""
    level = available.request.options.scope.over
    groups: dict[int, list[Segment]] = {}
    for segment in numa_set.segments:
        groups.setdefault(segment.part_of(level), []).append(segment)
    return list(groups.values())


def _nodes_in_sockets(
    available: AvailableUnits, domain: ScopeDomain, best: _BestSets | None
) -> _BestSets | None:
    """Search where every NUMA node lies in one socket: the sockets first, then the nodes in them."""
    by_socket: dict[int, list[SizedPart]] = {}
    for units, part in _useful(available, domain):
        by_socket.setdefault(part.socket, []).append((units, part))
    sockets = list(by_socket.values())
    if len(sockets) > 1 and all(len(parts) == 1 for parts in sockets):
        nodes = NodeSets(available, [part for (part,) in sockets], lambda part: (part.twin,))
        return _nearest(available, domain, nodes, ((count, count, count) for count in nodes.counts), best)
    capacity = [sum([units for units, _ in parts]) for parts in sockets]
    also = _amounts_of_sockets(available, sockets)
    for count in range(fewest(capacity, available.need), len(sockets) + 1):
        if available.budget.is_spent or (best is not None and count > best.rank.sockets):
            break
        for chosen in covers(
            capacity, range(len(capacity)), available.need, count, available.budget, also=also
        ):
            inside = [part for index in chosen for part in sockets[index]]
            nodes = NodeSets(available, inside, lambda part: (part.twin, part.socket))
            sizes = [(number, count, number) for number in nodes.counts if number >= count]
            best = _nearest(available, domain, nodes, sizes, best)
    return best


def _sockets_in_nodes(
    available: AvailableUnits, domain: ScopeDomain, best: _BestSets | None
) -> _BestSets | None:
    """Search where NUMA nodes hold several sockets, each a part: the fewest, and in the fewest nodes."""
    parts = list(_useful(available, domain))
    sets = NodeSets(available, parts, lambda part: (part.node,))
    nodes_there = len({part.node for _, part in parts})
    sizes = [
        (count, count, nodes) for count in sets.counts for nodes in range(1, min(count, nodes_there) + 1)
    ]
    return _nearest(available, domain, sets, sizes, best)


def _nearest(
    available: AvailableUnits,
    domain: ScopeDomain,
    sets: NodeSets,
    sizes: Iterable[tuple[int, int, int]],
    best: _BestSets | None,
) -> _BestSets | None:
    """Search sets of some sizes, the smallest first: parts, sockets, NUMA nodes."""
    for count, sockets, nodes in sizes:
        if available.budget.is_spent or (best is not None and (sockets, nodes) > best.rank.size):
            break
        best = _nearest_of_size(available, domain, sets, count, (sockets, nodes), best)
    return best


def _useful(available: AvailableUnits, domain: ScopeDomain) -> Iterator[SizedPart]:
    """Yield the parts that have something for the VM."""
    for part in domain.parts:
        units = available.units(part)
        if units or any(amounts[0] for amounts, _ in available.amounts_of([part.node])):
            yield units, part


def _amounts_of_sockets(
    available: AvailableUnits, sockets: Sequence[Sequence[SizedPart]]
) -> list[tuple[list[int], int]]:
    """Sum up memory and huge pages of each size by socket, each with its need."""
    in_each = [available.amounts_of([part.node for _, part in parts]) for parts in sockets]
    return [
        ([sum(amounts[number][0]) for amounts in in_each], need)
        for number, (_, need) in enumerate(in_each[0])
    ]


def _nearest_of_size(
    available: AvailableUnits,
    domain: ScopeDomain,
    sets: NodeSets,
    count: int,
    size: tuple[int, int],
    best: _BestSets | None,
) -> _BestSets | None:
    """Search the sets of so many parts and one size, in sockets and nodes; return them or the best so far."""
    sockets, nodes = size
    share = larger = socket_share = 0
    scope = available.request.options.scope
    if (
        scope.evenly
        and not available.needs_memory
        and not domain.divides_nodes
        and 1 < count <= available.need
    ):
        groups = {Level.SOCKET: sockets, Level.NUMA: nodes}[scope.level]
        if groups == count:
            share, larger = divmod(available.need, count)
        elif groups > 1:
            socket_share = available.need // groups

    for far, beside in available.device_choices:
        within = None
        if best is not None:
            before = (best.rank.size, best.rank.far_devices)
            if before < (size, far):
                break
            within = best.rank.distances if before == (size, far) else None

        def numa_sets_of(
            members: tuple[NodePart, ...], beside: tuple[frozenset[NumaIndex], ...] = beside
        ) -> Iterable[NumaSet]:
            if len({part.socket for part in members}) != sockets:
                return []
            if len({part.node for part in members}) != nodes:
                return []
            numa_set = NumaSet(members, domain, beside=beside)
            return [numa_set] if serves(available, numa_set) else []

        found = sets.nearest(
            count,
            numa_sets_of,
            nodes=nodes,
            beside=beside,
            within=within,
            share=share,
            larger=larger,
            socket_share=socket_share,
        )
        if found is not None:
            distances, numa_sets = found
            rank = NodeRank(*size, far, *distances)
            as_good = best.numa_sets if best is not None and best.rank == rank else []
            best = _BestSets(rank, as_good + numa_sets)
    return best


def most_shares_of(available: AvailableUnits, numa_set: NumaSet) -> int:
    """How many of the groups that the scope spreads over can give equal shares; 0 when no number can.

    The largest group beside each device gives a share, of one unit at least for each device.
    """
    groups = spread_groups(available, numa_set)
    units = [available.segment_units(segments) for segments in groups]
    least = [0] * len(units)
    for near in numa_set.beside:
        there = [n for n, segments in enumerate(groups) if any(one.node in near for one in segments)]
        least[max(there, key=lambda number: units[number])] += 1
    return most_shares(units, available.need, least)


def most_shares(units: Sequence[int], need: int, least: Sequence[int]) -> int:
    """How many of the groups can give equal shares at most; 0 when no number of them can.

    `least` has the units that each group must give.
    """
    fewest_groups = max(1, len(least) - least.count(0))
    ordered = sorted(zip(units, least, strict=True), reverse=True)
    if any(least):
        ordered.sort(key=lambda group: not group[1])
    counts = range(min(need, len(units)), fewest_groups - 1, -1)
    return next((count for count in counts if _shares_exist(ordered[:count], need)), 0)


def _shares_exist(groups: Sequence[tuple[int, int]], need: int) -> bool:
    """Whether groups, with the units and the least share of each, can give equal shares, up to one unit."""
    low, over = divmod(need, len(groups))
    larger = forced = 0
    for units, least in groups:
        if units < low or units < least or least > low + 1:
            return False
        larger += units > low
        forced += least > low
    return forced <= over <= larger
