"""A machine cut into segments for searching, computed once per machine.

A segment is what one NUMA node, one package and one L3 group have in common; on most machines that is the
L3 group itself. Levels may cross in any way: all that a search asks of a set of NUMA nodes is the list of
its segments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from kvplace.core.cpuset import cpus_of, place_of_each
from kvplace.core.refusal import THE_MACHINE
from kvplace.core.request import Level
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NumaIndex
from kvplace.core.topology import Topology

_MOST_LAYOUTS = 2048
_MOST_COUNTS = 1 << 17
"""Counts that are cached for all machines together, of about 1 KB each."""
_STATES_KEPT = 16
"""How many counts of every segment of a machine are cached at least."""


@dataclass(frozen=True, slots=True)
class Segment:
    """CPUs with the same NUMA node, package and L3 group, each given by its index in the topology.

    Packages are those of `Topology.sockets`.
    """

    node: NumaIndex
    package: int
    l3: int
    shared_l3: int
    """The same if the L3 group lies in several segments, else -1."""
    cpus: CpuMask
    cores: tuple[CpuMask, ...]
    """The parts of cores that lie here."""
    whole_cores: tuple[CpuMask, ...]
    """The cores that lie here entirely; only these can be given out whole."""
    kinds: Mapping[CpuMask, int]
    """The kind of each part of a core; empty on a machine with cores of one kind."""


@dataclass(frozen=True, slots=True)
class NodePart:
    """The part of a NUMA node that lies in a scope domain."""

    node: NumaIndex
    cpus: CpuMask
    segments: tuple[Segment, ...]
    packages: int
    """Indexes of its packages, as a bit set."""
    twin: NumaIndex
    """The first NUMA node that is as far from every other one."""


@dataclass(frozen=True, slots=True)
class ScopeDomain:
    """The domain that must hold a VM: a socket, a NUMA node or an L3 group for `one-*`, else the machine."""

    name: str
    cpus: CpuMask
    parts: tuple[NodePart, ...]
    crossed: bool
    """Whether some NUMA node lies in several packages."""
    straddled: bool
    """Whether some L3 group lies in several parts, or a part of it in several packages."""


@dataclass(frozen=True, slots=True)
class L3Part:
    """The supply of one L3 group, or of the part of it that a search may use."""

    units: int
    cores: tuple[tuple[CpuMask, int], ...]
    """(available CPUs, units) of each core, most units first, else in the machine's order."""
    widths: tuple[int, ...]
    """The units of each core, descending: L3 parts of equal widths and kinds are as good as each other."""
    kinds: tuple[int, ...] = ()
    """The kind of each core; empty on a machine with cores of one kind."""

    def only(self, kinds: Collection[int]) -> L3Part:
        """The cores of these kinds alone."""
        cores = [core for core, kind in zip(self.cores, self.kinds, strict=True) if kind in kinds]
        widths = tuple([units for _, units in cores])
        return L3Part(
            sum(widths), tuple(cores), widths, tuple([kind for kind in self.kinds if kind in kinds])
        )


@dataclass(frozen=True, slots=True)
class PartCount:
    """The supply of a part of a NUMA node."""

    units: int
    l3_parts: tuple[L3Part, ...]
    """Of each of its segments, in their order."""
    kind: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    """The shared L3 group, and the widths and kinds of the cores, of each segment.

    Parts with equal values here serve a need equally well.
    """
    reach_of_l3_parts: tuple[int, ...]
    """The most units in one L3 part, in two, and so on."""
    reach_of_cores: tuple[int, ...]
    """The most units on one core, on two, and so on."""

    def least_for(self, need: int) -> tuple[int, int]:
        """A lower bound on L3 parts and on cores for a need; there must be as much."""
        return bisect_left(self.reach_of_l3_parts, need) + 1, bisect_left(self.reach_of_cores, need) + 1


class Layout:
    """The domains of one machine by scope, and the distances between its NUMA nodes by index.

    Nothing here depends on memory or on reserved CPUs.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.l3_parts: dict[tuple[int, int, int], L3Part] = {}
        """Cached counts by (CPUs of a segment, those of them available, unit)."""
        self.part_counts: dict[tuple[int, int, int], PartCount] = {}
        """The same for parts of NUMA nodes."""
        ids = [node.id for node in topology.numa_nodes]
        self.distances = tuple(tuple(topology.distance(a, b) for b in ids) for a in ids)
        self._segments = tuple(_segments_of(topology))

    def forget_beyond(self, most: int) -> None:
        """Drop the cached counts when they are more than `most` and more than a few of each segment."""
        if len(self.l3_parts) + len(self.part_counts) > max(most, _STATES_KEPT * len(self._segments)):
            self.l3_parts.clear()
            self.part_counts.clear()

    @cached_property
    def domains(self) -> Mapping[Level, tuple[ScopeDomain, ...]]:
        """The parts of each level that may hold all CPUs of a VM, in the machine's order."""
        topology = self.topology
        socket = "socket" if topology.sockets == topology.packages else "numa"
        return {
            Level.MACHINE: (self._domain(THE_MACHINE, topology.cpus),),
            Level.SOCKET: tuple(self._domain(f"{socket} {p.id}", p.cpus) for p in topology.sockets),
            Level.NUMA: tuple(
                self._domain(f"numa {node.id}", node.cpus) for node in topology.numa_nodes if node.cpus
            ),
            Level.L3: tuple(
                self._domain(f"L3 group {index}", cpus) for index, cpus in enumerate(topology.l3_groups)
            ),
        }

    @cached_property
    def twins(self) -> tuple[NumaIndex, ...]:
        """For each NUMA node the first one that is as far from every other node: they can be exchanged."""
        nodes = range(len(self.distances))
        return tuple(
            next(
                NumaIndex(first)
                for first in nodes
                if first == node
                or all(
                    self.distances[first][other] == self.distances[node][other]
                    for other in nodes
                    if other not in (first, node)
                )
            )
            for node in nodes
        )

    @cached_property
    def l3_of(self) -> Mapping[CpuId, int]:
        """The index of the L3 group of each CPU."""
        return {cpu: segment.l3 for segment in self._segments for cpu in cpus_of(segment.cpus)}

    @cached_property
    def node_of(self) -> Mapping[CpuId, NumaIndex]:
        """The index of the NUMA node of each CPU."""
        return {cpu: segment.node for segment in self._segments for cpu in cpus_of(segment.cpus)}

    @cached_property
    def package_of(self) -> Mapping[CpuId, int]:
        """The index of the package of each CPU."""
        return {cpu: segment.package for segment in self._segments for cpu in cpus_of(segment.cpus)}

    def _domain(self, name: str, cpus: CpuMask) -> ScopeDomain:
        by_node: dict[NumaIndex, list[Segment]] = {}
        for segment in self._segments:
            if segment.cpus & cpus:
                by_node.setdefault(segment.node, []).append(_cut(segment, cpus))
        parts: list[NodePart] = []
        for index, segments in sorted(by_node.items()):
            packages = 0
            for segment in segments:
                packages |= 1 << segment.package
            inside = CpuMask(self.topology.numa_nodes[index].cpus & cpus)
            parts.append(NodePart(index, inside, tuple(segments), packages, self.twins[index]))
        groups = [segment.l3 for part in parts for segment in part.segments]
        return ScopeDomain(
            name,
            CpuMask(cpus),
            tuple(parts),
            crossed=any(part.packages & (part.packages - 1) for part in parts),
            straddled=len(set(groups)) < len(groups),
        )


def _segments_of(topology: Topology) -> Iterator[Segment]:
    """Yield the segments by NUMA node, package and L3 group, with their cores in the machine's order."""
    levels = [
        place_of_each(level)
        for level in (
            [node.cpus for node in topology.numa_nodes],
            [socket.cpus for socket in topology.sockets],
            topology.l3_groups,
        )
    ]
    pieces: dict[tuple[int, ...], dict[CpuMask, CpuMask]] = {}
    for core in topology.cores:
        for cpu in cpus_of(core):
            inside = pieces.setdefault(tuple([place_of[cpu] for place_of in levels]), {})
            inside[core] = inside.get(core, NO_CPUS) | 1 << cpu
    undivided = set(topology.undivided_cores)
    mixed = len(set(topology.kind_of_core.values())) > 1
    segments_of_l3 = Counter([l3 for _, _, l3 in pieces])
    for (node, package, l3), by_core in sorted(pieces.items()):
        cores = tuple(by_core.values())
        cpus = NO_CPUS
        for core in cores:
            cpus |= core
        shared_l3 = l3 if segments_of_l3[l3] > 1 else -1
        whole_cores = tuple([core for core in cores if core in undivided])
        kinds = {part: topology.kind_of_core[core] for core, part in by_core.items()} if mixed else {}
        yield Segment(NumaIndex(node), package, l3, shared_l3, cpus, cores, whole_cores, kinds)


def _cut(segment: Segment, cpus: CpuMask) -> Segment:
    if not segment.cpus & ~cpus:
        return segment
    cores = tuple(core & cpus for core in segment.cores if core & cpus)
    whole = tuple(core for core in segment.whole_cores if not core & ~cpus)
    kinds = {CpuMask(core & cpus): kind for core, kind in segment.kinds.items() if core & cpus}
    return replace(segment, cpus=segment.cpus & cpus, cores=cores, whole_cores=whole, kinds=kinds)


_layouts: dict[str, Layout] = {}


def layout_of(topology: Topology) -> Layout:
    """Return the layout of a machine; machines that differ in memory alone share one.

    All together share the size of the cache.
    """
    layout = _layouts.get(topology.shape)
    if layout is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        layout = _layouts[topology.shape] = Layout(topology)
    layout.forget_beyond(_MOST_COUNTS // len(_layouts))
    return layout
