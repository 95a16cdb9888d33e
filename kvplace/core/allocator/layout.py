"""The tree of one machine that searches descend, computed once per machine.

Sockets, NUMA nodes and L3 groups nest, on each machine in its own order: a socket holds several NUMA nodes or
a NUMA node several sockets, and an L3 group is inside a NUMA node or holds several. A part is the finer one
of socket and NUMA node. A segment is the finer one of part and L3 group.

Levels that cross (`numa=fake`) are cut: a part is the intersection of a socket and a NUMA node, and an L3
group ends at the border of a part. A piece of a socket then counts as a socket, and a piece of an L3 group as
an L3 group, so that a placement may use more of them than it has to. Whether a VM fits does not change:
scopes and equal shares use the real levels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from kvplace.core.cpuset import cpus_of, place_of_each, union
from kvplace.core.placement import THE_MACHINE
from kvplace.core.request import Level
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NumaIndex
from kvplace.core.topology import Topology

_MOST_LAYOUTS = 2048
_MOST_COUNTS = 1 << 17
"""Counts that are cached for all machines together, of about 1 KB each."""
_STATES_KEPT = 16
"""The least number of cached counts for every segment of a machine."""


@dataclass(frozen=True, slots=True)
class Segment:
    """CPUs with the same NUMA node, socket and L3 group.

    NUMA nodes and sockets are given by their index in the topology.
    """

    node: NumaIndex
    socket: int
    l3: int
    """The number of the L3 group or, where it crosses another level, of the piece of it."""
    shared_l3: int
    """The same if the L3 group lies in several segments, else -1."""
    cpus: CpuMask
    cores: tuple[CpuMask, ...]
    """The parts of cores that lie here."""
    whole_cores: tuple[CpuMask, ...]
    """The cores that lie here entirely; only these can be given out whole."""
    kinds: Mapping[CpuMask, int]
    """The kind of each part of a core; empty on a machine with cores of one kind."""

    def part_of(self, level: Level) -> int:
        """The number of the part of a level that holds the segment."""
        match level:
            case Level.NUMA:
                return self.node
            case Level.SOCKET:
                return self.socket
            case Level.L3:
                return self.l3
            case Level.MACHINE:
                return 0


@dataclass(frozen=True, slots=True)
class NodePart:
    """The part of a NUMA node that lies in a scope domain and in one socket."""

    node: NumaIndex
    cpus: CpuMask
    segments: tuple[Segment, ...]
    socket: int
    """The number of its socket or, where this crosses NUMA nodes, of the piece of it."""
    twin: NumaIndex
    """The first NUMA node that is as far from every other one."""


@dataclass(frozen=True, slots=True)
class ScopeDomain:
    """The domain that must hold a VM: a socket, a NUMA node or an L3 group for `one-*`, else the machine."""

    name: str
    cpus: CpuMask
    parts: tuple[NodePart, ...]
    divides_nodes: bool
    """Whether some NUMA node has several parts, one for each socket."""
    shares_l3: bool
    """Whether some L3 group holds several parts."""


@dataclass(frozen=True, slots=True)
class L3Part:
    """Units of one L3 group, or of the part of it that a search may use."""

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
    """Units of a part of a NUMA node."""

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
        """Cached counts by (CPUs of a segment, its available CPUs, unit)."""
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
        return {
            Level.MACHINE: (self._domain(THE_MACHINE, topology.cpus),),
            Level.SOCKET: tuple(
                self._domain(_socket_name(topology, socket.id), socket.cpus) for socket in topology.sockets
            ),
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
    def place_of(self) -> Mapping[CpuId, tuple[int, NumaIndex, int]]:
        """The indexes of the socket, the NUMA node and the L3 group of each CPU."""
        l3_of = place_of_each(self.topology.l3_groups)
        return {
            cpu: (segment.socket, segment.node, l3_of[cpu])
            for segment in self._segments
            for cpu in cpus_of(segment.cpus)
        }

    def _domain(self, name: str, cpus: CpuMask) -> ScopeDomain:
        by_part: dict[tuple[NumaIndex, int], list[Segment]] = {}
        for segment in self._segments:
            if segment.cpus & cpus:
                by_part.setdefault((segment.node, segment.socket), []).append(_cut(segment, cpus))
        crossed = _cross(by_part.keys())
        parts = tuple(
            NodePart(
                node,
                union(segment.cpus for segment in segments),
                tuple(segments),
                number if crossed else socket,
                self.twins[node],
            )
            for number, ((node, socket), segments) in enumerate(sorted(by_part.items()))
        )
        groups = [segment.l3 for part in parts for segment in part.segments]
        return ScopeDomain(
            name,
            CpuMask(cpus),
            parts,
            divides_nodes=len(parts) > len({part.node for part in parts}),
            shares_l3=len(set(groups)) < len(groups),
        )


def _socket_name(topology: Topology, number: int) -> str:
    return {"machine": THE_MACHINE, "NUMA node": f"numa {number}"}.get(
        topology.socket_noun, f"socket {number}"
    )


def _segments_of(topology: Topology) -> Iterator[Segment]:
    """Yield the segments by NUMA node, socket and L3 group, with their cores in the machine's order."""
    node_of = place_of_each([node.cpus for node in topology.numa_nodes])
    socket_of = place_of_each([socket.cpus for socket in topology.sockets])
    l3_of = place_of_each(topology.l3_groups)
    pieces: dict[tuple[int, int, int], dict[CpuMask, CpuMask]] = {}
    for core in topology.cores:
        for cpu in cpus_of(core):
            inside = pieces.setdefault((node_of[cpu], socket_of[cpu], l3_of[cpu]), {})
            inside[core] = inside.get(core, NO_CPUS) | 1 << cpu
    undivided = set(topology.undivided_cores)
    mixed = len(set(topology.kind_of_core.values())) > 1
    found = sorted(pieces.items())
    if _cross({(node, l3) for node, _, l3 in pieces}) or _cross({(socket, l3) for _, socket, l3 in pieces}):
        found = [
            ((node, socket, number), by_core) for number, ((node, socket, _), by_core) in enumerate(found)
        ]
    segments_of_l3 = Counter([l3 for (_, _, l3), _ in found])
    for (node, socket, l3), by_core in found:
        cores = tuple(by_core.values())
        whole_cores = tuple([core for core in cores if core in undivided])
        kinds = {part: topology.kind_of_core[core] for core, part in by_core.items()} if mixed else {}
        shared_l3 = l3 if segments_of_l3[l3] > 1 else -1
        yield Segment(NumaIndex(node), socket, l3, shared_l3, union(cores), cores, whole_cores, kinds)


def _cross(meetings: Collection[tuple[int, int]]) -> bool:
    """Whether two levels cross; `meetings` has each pair of a part of the one and a part of the other."""
    return len(meetings) > max(len({one for one, _ in meetings}), len({other for _, other in meetings}))


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

    All layouts together share the size of the cache.
    """
    layout = _layouts.get(topology.shape)
    if layout is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        layout = _layouts[topology.shape] = Layout(topology)
    layout.forget_beyond(_MOST_COUNTS // len(_layouts))
    return layout
