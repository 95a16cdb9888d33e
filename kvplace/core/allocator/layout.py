"""A machine's levels cut into pieces for searching, worked out once per machine.

A cell is what one NUMA node, one package and one L3 group have in common; on most machines that is the
L3 group itself. Levels may cross in any way: all that the search asks of a region of the machine is the
list of its cells.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvplace.core.cpuset import cpus_of, place_of_each
from kvplace.core.refusal import THE_MACHINE
from kvplace.core.request import Scope
from kvplace.core.topology import Topology

_MOST_LAYOUTS = 2048
_MOST_COUNTS = 1 << 17
"""Counts remembered of all machines together, of about 1 KB each."""
_STATES_KEPT = 16
"""How often every cell of a machine may be counted anew before its counts are forgotten."""


@dataclass(frozen=True, slots=True)
class Cell:
    """CPUs with the same NUMA node, package and L3 group, each given by its index in the topology."""

    node: int
    package: int
    l3: int
    cpus: int
    cores: tuple[int, ...]
    """The parts of cores that lie here."""
    whole_cores: tuple[int, ...]
    """The cores that lie here entirely; only these can be given out whole."""


@dataclass(frozen=True, slots=True)
class NodePart:
    """What of one NUMA node lies in a domain."""

    node: int
    cpus: int
    cells: tuple[Cell, ...]
    packages: int
    """Indexes of its packages, as a bit set."""
    surroundings: tuple[int, ...]
    """Its twin and the L3 groups that it shares: parts of equal surroundings can be exchanged."""


@dataclass(frozen=True, slots=True)
class Domain:
    """One place that holds all CPUs of a VM: a socket, a NUMA node, an L3 group, the machine."""

    name: str
    cpus: int
    parts: tuple[NodePart, ...]
    crossed: bool
    """Whether some NUMA node lies in several packages."""
    straddled: bool
    """Whether some L3 group lies in several parts, or a part of it in several packages."""


@dataclass(frozen=True, slots=True)
class Bin:
    """What is available in one L3 group, or in the part of it that a search may use."""

    units: int
    cores: tuple[tuple[int, int], ...]
    """(available CPUs, units) of each core, most units first, else in the machine's order."""
    widths: tuple[int, ...]
    """The units of each core, descending: bins of equal widths are as good as each other."""


@dataclass(frozen=True, slots=True)
class PartCount:
    """What is available in a part of a NUMA node."""

    units: int
    bins: tuple[Bin, ...]
    """Of each of its cells, in their order."""
    kind: tuple[tuple[int, ...], ...]
    """The widths of its bins, sorted: parts of one kind serve a need equally well."""
    reach_of_bins: tuple[int, ...]
    """The most units in one bin, in two, and so on."""
    reach_of_cores: tuple[int, ...]
    """The most units on one core, on two, and so on."""

    def least_for(self, need: int) -> tuple[int, int]:
        """How many bins, and how many cores, a need takes at least; there must be as much."""
        return bisect_left(self.reach_of_bins, need) + 1, bisect_left(self.reach_of_cores, need) + 1


class Layout:
    """The domains of one machine by scope, and the distances between its NUMA nodes by index."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.bins: dict[tuple[int, int, int], Bin] = {}
        """What was counted before, by (CPUs of a cell, those of them available, kind of unit)."""
        self.part_counts: dict[tuple[int, int, int], PartCount] = {}
        """The same of parts of NUMA nodes."""
        ids = [node.id for node in topology.numa_nodes]
        self.distances = tuple(tuple(topology.distance(a, b) for b in ids) for a in ids)
        self._cells = tuple(_cells_of(topology))

    def forget_beyond(self, most: int) -> None:
        """Forget what was counted, when it is more than so much and more than a few states of the machine."""
        if len(self.bins) + len(self.part_counts) > max(most, _STATES_KEPT * len(self._cells)):
            self.bins.clear()
            self.part_counts.clear()

    @cached_property
    def domains(self) -> Mapping[Scope, tuple[Domain, ...]]:
        """Where all the CPUs of a VM may lie, by scope, in the machine's order."""
        topology = self.topology
        machine = (self._domain(THE_MACHINE, topology.cpus),)
        return {
            Scope.ONE_SOCKET: tuple(self._domain(f"socket {p.id}", p.cpus) for p in topology.packages),
            Scope.ONE_NUMA: tuple(
                self._domain(f"numa {node.id}", node.cpus) for node in topology.numa_nodes if node.cpus
            ),
            Scope.ONE_L3: tuple(
                self._domain(f"L3 group {index}", cpus) for index, cpus in enumerate(topology.l3_groups)
            ),
            Scope.SPREAD_SOCKETS: machine,
            Scope.SPREAD_NUMA: machine,
            Scope.ANY: machine,
        }

    @cached_property
    def twins(self) -> tuple[int, ...]:
        """For each NUMA node the first one that is as far from every other node: they can be exchanged."""
        nodes = range(len(self.distances))
        return tuple(
            next(
                first
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
    def l3_of(self) -> Mapping[int, int]:
        """The index of the L3 group of each CPU."""
        return {cpu: cell.l3 for cell in self._cells for cpu in cpus_of(cell.cpus)}

    @cached_property
    def node_of(self) -> Mapping[int, int]:
        """The index of the NUMA node of each CPU."""
        return {cpu: cell.node for cell in self._cells for cpu in cpus_of(cell.cpus)}

    @cached_property
    def package_of(self) -> Mapping[int, int]:
        """The index of the package of each CPU."""
        return {cpu: cell.package for cell in self._cells for cpu in cpus_of(cell.cpus)}

    def shared_l3_groups(self, cells: Iterable[Cell]) -> tuple[int, ...]:
        """The L3 groups of cells that lie in several cells of the machine; none on most machines."""
        return tuple(cell.l3 for cell in cells if cell.l3 in self._shared_l3)

    @cached_property
    def _shared_l3(self) -> frozenset[int]:
        groups = Counter(cell.l3 for cell in self._cells)
        return frozenset(group for group, count in groups.items() if count > 1)

    def _domain(self, name: str, cpus: int) -> Domain:
        by_node: dict[int, list[Cell]] = {}
        for cell in self._cells:
            if cell.cpus & cpus:
                by_node.setdefault(cell.node, []).append(_cut(cell, cpus))
        parts: list[NodePart] = []
        for index, cells in sorted(by_node.items()):
            packages = 0
            for cell in cells:
                packages |= 1 << cell.package
            inside = self.topology.numa_nodes[index].cpus & cpus
            surroundings = (self.twins[index], *self.shared_l3_groups(cells))
            parts.append(NodePart(index, inside, tuple(cells), packages, surroundings))
        groups = [cell.l3 for part in parts for cell in part.cells]
        return Domain(
            name,
            cpus,
            tuple(parts),
            crossed=any(part.packages & (part.packages - 1) for part in parts),
            straddled=len(set(groups)) < len(groups),
        )


def _cells_of(topology: Topology) -> Iterator[Cell]:
    """Yield the cells by their NUMA node, package and L3 group, with their cores in the machine's order."""
    levels = [
        place_of_each(level)
        for level in (
            [node.cpus for node in topology.numa_nodes],
            [package.cpus for package in topology.packages],
            topology.l3_groups,
        )
    ]
    pieces: dict[tuple[int, ...], dict[int, int]] = {}
    for core in topology.cores:
        for cpu in cpus_of(core):
            inside = pieces.setdefault(tuple([place_of[cpu] for place_of in levels]), {})
            inside[core] = inside.get(core, 0) | 1 << cpu
    undivided = set(topology.undivided_cores)
    for (node, package, l3), by_core in sorted(pieces.items()):
        cores = tuple(by_core.values())
        cpus = 0
        for core in cores:
            cpus |= core
        yield Cell(node, package, l3, cpus, cores, tuple([core for core in cores if core in undivided]))


def _cut(cell: Cell, cpus: int) -> Cell:
    if not cell.cpus & ~cpus:
        return cell
    cores = tuple(core & cpus for core in cell.cores if core & cpus)
    whole = tuple(core for core in cell.whole_cores if not core & ~cpus)
    return Cell(cell.node, cell.package, cell.l3, cell.cpus & cpus, cores, whole)


_layouts: dict[str, Layout] = {}


def layout_of(topology: Topology) -> Layout:
    """The layout of a machine; equal machines share one, and all of them what may be remembered."""
    layout = _layouts.get(topology.fingerprint)
    if layout is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        layout = _layouts[topology.fingerprint] = Layout(topology)
    layout.forget_beyond(_MOST_COUNTS // len(_layouts))
    return layout
