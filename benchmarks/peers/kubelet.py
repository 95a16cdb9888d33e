"""The kubelet's static CPU manager policy: packed, packed by L3, distributed, inside a NUMA mask.

Units are ordered everywhere by (free CPUs ascending, id ascending), level by level. With as many sockets
as NUMA nodes or more, NUMA nodes are the outer level, otherwise sockets are. A core counts as free when as
many of its CPUs are free as cores have on average, and is then taken with all its CPUs: right where every
core is alike, and wrong on hybrid CPUs, as the kubelet is. Ids of cores and L3 groups are their places in
the topology.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import combinations

from kvplace.core.cpuset import cpus_of, lowest, mask_of
from kvplace.core.scalars import CpuMask, NumaId
from kvplace.core.topology import Topology

Take = Callable[[Topology, int, int], int | None]


def packed(topology: Topology, free: int, count: int) -> int | None:
    """Whole NUMA nodes and sockets, whole cores, single CPUs."""
    return _take(topology, free, count, by_l3=False)


def packed_by_l3(topology: Topology, free: int, count: int) -> int | None:
    """As `packed`, and before whole cores whole L3 groups, then the first that covers the rest.

    Option `prefer-align-cpus-by-uncorecache`.
    """
    return _take(topology, free, count, by_l3=True)


def with_numa_mask(
    topology: Topology, free: int, count: int, *, nodes: Iterable[int] | None = None, take: Take = packed
) -> int | None:
    """First from the NUMA nodes of the TopologyManager's hint, the rest from anywhere.

    Without `nodes` the hint is what policy `best-effort` merges for CPUs alone: the fewest nodes with
    enough free CPUs, of these the lowest numbers.
    """
    if nodes is None:
        nodes = _hint(topology, free, count)
    inside = free & mask_of(cpu for id_ in nodes for cpu in cpus_of(topology.node_by_id[NumaId(id_)].cpus))
    aligned = take(topology, inside, min(count, inside.bit_count()))
    if aligned is None:
        return None
    rest = take(topology, free & ~aligned, count - aligned.bit_count())
    return None if rest is None else aligned | rest


def _hint(topology: Topology, free: int, count: int) -> tuple[int, ...]:
    nodes = topology.numa_nodes
    sizes = {node.id: (node.cpus & free).bit_count() for node in nodes}
    for fewest in range(1, len(nodes) + 1):
        # Of equally narrow masks the TopologyManager prefers the smaller number that the bits make.
        wide_enough = [
            group
            for group in combinations(sorted(sizes), fewest)
            if sum(sizes[id_] for id_ in group) >= count
        ]
        if wide_enough:
            return min(wide_enough, key=mask_of)
    return tuple(sizes)


class _Level:
    """One level of the machine as `(id, CPUs)`, and its units in each unit of another level."""

    def __init__(self, units: Sequence[tuple[int, int]]) -> None:
        self.units = tuple(units)
        self._inside: dict[int, tuple[tuple[int, int], ...]] = {}

    def inside(self, cpus: int) -> tuple[tuple[int, int], ...]:
        """The units that share CPUs with a set; remembered."""
        if cpus not in self._inside:
            self._inside[cpus] = tuple(unit for unit in self.units if unit[1] & cpus)
        return self._inside[cpus]


class _Shape:
    """The kubelet's view of a machine."""

    def __init__(self, topology: Topology) -> None:
        self.sockets = _Level([(package.id, package.cpus) for package in topology.packages])
        self.nodes = _Level([(node.id, node.cpus) for node in topology.numa_nodes if node.cpus])
        self.l3_groups = _Level(list(enumerate(topology.l3_groups)))
        self.cores = _Level(list(enumerate(topology.cores)))
        total = topology.cpus.bit_count()
        self.cpus_per_core = total // len(topology.cores)
        self.cpus_per_socket = total // len(topology.packages)
        self.cpus_per_l3 = total // len(topology.l3_groups)
        self.nodes_first = len(topology.packages) >= len(self.nodes.units)
        self.outer, self.inner = (
            (self.nodes, self.sockets) if self.nodes_first else (self.sockets, self.nodes)
        )


@lru_cache(maxsize=64)
def _shape(topology: Topology) -> _Shape:
    return _Shape(topology)


class _Accumulator:
    """CPUs taken so far, and what is still free and needed."""

    def __init__(self, shape: _Shape, free: int, count: int) -> None:
        self.shape = shape
        self.free = free
        self.needed = count
        self.taken = 0

    def take(self, cpus: int) -> None:
        """Take CPUs, free or not: the kubelet does not check again either."""
        self.taken |= cpus
        self.free &= ~cpus
        self.needed -= cpus.bit_count()

    def ordered(self, units: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Units with a free CPU, the fullest first."""
        counted = [((cpus & self.free).bit_count(), id_, cpus) for id_, cpus in units]
        return [(id_, cpus) for count, id_, cpus in sorted(counted) if count]

    def outer(self) -> list[tuple[int, int]]:
        """The units of the outer of the levels socket and NUMA node."""
        return self.ordered(self.shape.outer.units)

    def inner(self) -> list[tuple[int, int]]:
        """The units of the inner level, one outer unit after the other."""
        return [
            unit
            for _, cpus in self.outer()
            for unit in self.ordered(self.shape.inner.inside(cpus & self.free))
        ]

    def nodes(self) -> list[tuple[int, int]]:
        """NUMA nodes."""
        return self.outer() if self.shape.nodes_first else self.inner()

    def cores(self) -> list[tuple[int, int]]:
        """Cores, one unit of the inner level after the other."""
        return [unit for _, cpus in self.inner() for unit in self.ordered(self.shape.cores.inside(cpus))]

    def take_whole_nodes(self) -> None:
        """Whole free NUMA nodes that are wanted in full."""
        for _, cpus in self.nodes():
            if cpus & ~self.free == 0 and self.needed >= cpus.bit_count():
                self.take(cpus)

    def take_whole_sockets(self) -> None:
        """Whole free sockets that are wanted in full."""
        sockets = self.inner() if self.shape.nodes_first else self.outer()
        for _, cpus in sockets:
            whole = (cpus & self.free).bit_count() == self.shape.cpus_per_socket
            if whole and self.needed >= cpus.bit_count():
                self.take(cpus)

    def take_l3_groups(self) -> None:
        """Whole free L3 groups, then the first one with exactly the rest in its lowest cores."""
        ordered = [
            unit for _, cpus in self.nodes() for unit in self.ordered(self.shape.l3_groups.inside(cpus))
        ]
        for _, partial in ordered:
            if self.needed >= self.shape.cpus_per_l3:
                for _, cpus in ordered:
                    if cpus & ~self.free == 0 and self.needed >= cpus.bit_count():
                        self.take(cpus)
            if self.needed <= 0:
                return
            self._take_part_of(partial)
            if self.needed <= 0:
                return

    def _take_part_of(self, l3_group: int) -> None:
        per_core = self.shape.cpus_per_core
        cores = [core for _, core in self.shape.cores.inside(l3_group) if core & self.free]
        free = 0
        for core in cores[: -(-self.needed // per_core)]:
            free |= core & self.free
        if self.needed % 2 and per_core > 1 and free.bit_count() > self.needed:
            free = lowest(CpuMask(free), free.bit_count() - 1)
        if free.bit_count() == self.needed:
            self.take(free)

    def take_whole_cores(self) -> None:
        """Cores that count as free, while they are wanted in full."""
        for _, cpus in self.cores():
            whole = (cpus & self.free).bit_count() == self.shape.cpus_per_core
            if whole and self.needed >= cpus.bit_count():
                self.take(cpus)

    def take_single_cpus(self) -> None:
        """CPU by CPU, of the fullest cores first."""
        for _, core in self.cores():
            for cpu in cpus_of(CpuMask(core & self.free)):
                if self.needed <= 0:
                    return
                self.take(1 << cpu)


def _take(topology: Topology, free: int, count: int, *, by_l3: bool) -> int | None:
    if free.bit_count() < count:
        return None
    rest = _Accumulator(_shape(topology), free, count)
    whole = [rest.take_whole_nodes, rest.take_whole_sockets]
    steps = whole if rest.shape.nodes_first else whole[::-1]
    if by_l3:
        steps.append(rest.take_l3_groups)
    for step in [*steps, rest.take_whole_cores, rest.take_single_cpus]:
        if rest.needed <= 0:
            break
        step()
    return rest.taken


def distributed(topology: Topology, free: int, count: int) -> int | None:
    """Even shares of as few NUMA nodes as can give them, the nodes left as even as may be.

    Option `distribute-cpus-across-numa` together with `full-pcpus-only`. Of all sets of nodes of one size the
    first with the least standard deviation of free CPUs afterwards; L3 groups are not checked.
    """
    shape = _shape(topology)
    group = shape.cpus_per_core
    if free.bit_count() < count:
        return None
    if count % group or not count:
        return packed(topology, free, count)
    state = _Accumulator(shape, free, count)
    ordered = state.nodes()
    sizes = {id_: (cpus & free).bit_count() for id_, cpus in ordered}
    groups_per_node = math.ceil(topology.cpus.bit_count() / group / len(shape.nodes.units))
    needed = count // group
    for width in range(math.ceil(needed / groups_per_node), min(needed, len(ordered)) + 1):
        best = _most_even(sizes, width, count, group)
        if best is None:
            continue
        chosen, extra = best
        share = count // width // group * group
        for id_ in chosen:
            state.take(packed(topology, state.free & topology.node_by_id[NumaId(id_)].cpus, share) or 0)
        while state.needed > 0:
            for id_ in extra:
                left = state.free & topology.node_by_id[NumaId(id_)].cpus
                if state.needed > 0 and left.bit_count() >= group:
                    state.take(packed(topology, left, group) or 0)
        return state.taken
    return packed(topology, free, count)


def _most_even(
    sizes: dict[int, int], width: int, count: int, group: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The nodes that share the count, and those of them that give one group more."""
    best: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    least = math.inf
    share = count // width // group * group
    rest = count - share * width
    for chosen in combinations(sizes, width):
        if any(sizes[id_] < share for id_ in chosen):
            continue
        if sum(sizes[id_] // group for id_ in chosen) * group < count:
            continue
        left = {id_: size - share if id_ in chosen else size for id_, size in sizes.items()}
        able = [id_ for id_ in chosen if left[id_] >= group]
        for extra in combinations(able, rest // group):
            after = [size - group if id_ in extra else size for id_, size in left.items()]
            spread = _deviation(after)
            if spread < least:
                best, least = (chosen, extra), spread
        if least == 0:
            break
    return best


def _deviation(amounts: Sequence[int]) -> float:
    mean = sum(amounts) / len(amounts)
    return round(math.sqrt(sum((amount - mean) ** 2 for amount in amounts) / len(amounts)), 3)
