"""The core map of a machine as drawing data: nested boxes with a cell for every thread.

The nesting is the one that operators know from lstopo: socket, NUMA node, L3, core, thread. The terminal,
JSON and any web page draw the same data. Owners are told apart by letters, so that a map is readable without
colours and on paper. Levels need not nest in a real machine; each box holds the part of its level that lies
in the box around it, so a NUMA node that spans two sockets stands in both.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvplace.core.cpuset import cpus_of, format_cpu_list
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.topology import NumaNode, Topology


class CellState(Enum):
    """What a thread of the machine is used for."""

    FREE = "free"
    RESERVED = "reserved"
    OWNED = "owned"
    IDLE = "idle"
    """Owned, and kept free of work by its owner: the sibling of an isolated vCPU."""
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Cell:
    """One thread."""

    cpu: int
    state: CellState
    label: str = ""
    """Letters of the VM that owns it; for a shared one, of the only VM that names it."""
    uses: int = 0
    """How many VMs share it."""


@dataclass(frozen=True, slots=True)
class CoreBox:
    """The threads of one core, ascending."""

    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class L3Box:
    """An L3 cache, by its place among the machine's L3 groups."""

    index: int
    cores: tuple[CoreBox, ...]


@dataclass(frozen=True, slots=True)
class NodeBox:
    """A NUMA node with its memory in bytes."""

    id: int
    memory: int
    """All of it, huge pages included; 0 when the machine does not say."""
    free_memory: int
    """What is neither set aside as huge pages nor claimed."""
    huge_pages: Mapping[int, tuple[int, int]]
    """(Free, all) by page size in bytes."""
    l3_groups: tuple[L3Box, ...]


@dataclass(frozen=True, slots=True)
class PackageBox:
    """A socket."""

    id: int
    nodes: tuple[NodeBox, ...]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """Whose letters stand in the cells."""

    label: str
    claim: Claim


@dataclass(frozen=True, slots=True)
class CoreMap:
    """A machine drawn."""

    name: str
    packages: tuple[PackageBox, ...]
    memory_only: tuple[NodeBox, ...]
    """NUMA nodes without CPUs."""
    legend: tuple[LegendEntry, ...]

    @property
    def cells(self) -> Iterator[Cell]:
        """Every thread once, in the order of the drawing."""
        for package in self.packages:
            for node in package.nodes:
                for l3 in node.l3_groups:
                    for core in l3.cores:
                        yield from core.cells

    def count(self, state: CellState) -> int:
        """Say how many threads are in this state."""
        return sum(1 for cell in self.cells if cell.state is state)


def draw(name: str, topology: Topology, ledger: Ledger | None = None) -> CoreMap:
    """Draw a machine with what its ledger says is claimed.

    VMs are lettered in the order of the lowest CPU they use, so the letters follow the drawing.
    """
    book = ledger if ledger is not None else Ledger()
    claims = sorted(book.claims.values(), key=lambda claim: (_first(claim.cpus | claim.owned), claim.uid))
    labels = {claim.uid: label_of(index) for index, claim in enumerate(claims)}
    painter = _Painter(topology, book, labels)
    return CoreMap(
        name=name,
        packages=tuple(
            PackageBox(package.id, tuple(painter.nodes_in(package.cpus))) for package in topology.packages
        ),
        memory_only=tuple(painter.node(node, 0) for node in topology.numa_nodes if not node.cpus),
        legend=tuple(LegendEntry(labels[claim.uid], claim) for claim in claims),
    )


def label_of(index: int) -> str:
    """Name the n-th VM: A to Z, then AA, AB and so on."""
    label = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        label = string.ascii_uppercase[letter] + label
    return label


class _Painter:
    def __init__(self, topology: Topology, ledger: Ledger, labels: Mapping[str, str]) -> None:
        self._topology = topology
        self._ledger = ledger
        self._labels = labels
        self._working = 0
        self._sharers: dict[int, list[str]] = {}
        for uid, claim in ledger.claims.items():
            self._working |= claim.cpus & claim.owned
            for cpu in cpus_of(claim.cpus & ~claim.owned):
                self._sharers.setdefault(cpu, []).append(uid)

    def nodes_in(self, cpus: int) -> Iterator[NodeBox]:
        for node in self._topology.numa_nodes:
            if node.cpus & cpus:
                yield self.node(node, node.cpus & cpus)

    def node(self, node: NumaNode, cpus: int) -> NodeBox:
        in_pages = sum(size * count for size, count in node.huge_pages.items())
        claimed = self._ledger.plain_memory.get(node.id, 0)
        pages = self._ledger.huge_pages
        return NodeBox(
            id=node.id,
            memory=node.memory,
            free_memory=max(0, node.memory - in_pages - claimed),
            huge_pages={
                size: (count - pages.get((node.id, size), 0), count)
                for size, count in sorted(node.huge_pages.items())
            },
            l3_groups=tuple(
                L3Box(index, tuple(self._cores_in(l3 & cpus)))
                for index, l3 in enumerate(self._topology.l3_groups)
                if l3 & cpus
            ),
        )

    def _cores_in(self, cpus: int) -> Iterator[CoreBox]:
        for core in self._topology.cores:
            if core & cpus:
                yield CoreBox(tuple(self._cell(cpu) for cpu in cpus_of(core & cpus)))

    def _cell(self, cpu: int) -> Cell:
        owner = self._ledger.owners.get(cpu)
        if owner is not None:
            state = CellState.OWNED if self._working >> cpu & 1 else CellState.IDLE
            return Cell(cpu, state, self._labels.get(owner, "?"))
        sharers = self._sharers.get(cpu, [])
        if sharers:
            label = self._labels[sharers[0]] if len(sharers) == 1 else ""
            return Cell(cpu, CellState.SHARED, label, len(sharers))
        return Cell(cpu, CellState.RESERVED if self._topology.reserved >> cpu & 1 else CellState.FREE)


def core_map_document(drawing: CoreMap) -> dict[str, Any]:
    """Write a drawing as JSON."""
    return {
        "name": drawing.name,
        "sockets": [
            {"id": package.id, "numaNodes": [_node_document(node) for node in package.nodes]}
            for package in drawing.packages
        ],
        "memoryOnlyNodes": [_node_document(node) for node in drawing.memory_only],
        "legend": [
            {
                "label": entry.label,
                "namespace": entry.claim.namespace,
                "pod": entry.claim.pod,
                "vmi": entry.claim.vmi,
                "policy": entry.claim.policy.value,
                "cpus": format_cpu_list(entry.claim.cpus),
                "owned": format_cpu_list(entry.claim.owned),
            }
            for entry in drawing.legend
        ],
    }


def _node_document(node: NodeBox) -> dict[str, Any]:
    return {
        "id": node.id,
        "memory": node.memory,
        "freeMemory": node.free_memory,
        "hugePages": {
            str(size): {"free": free, "count": count} for size, (free, count) in node.huge_pages.items()
        },
        "l3Groups": [
            {"index": l3.index, "cores": [[_cell_document(cell) for cell in core.cells] for core in l3.cores]}
            for l3 in node.l3_groups
        ],
    }


def _cell_document(cell: Cell) -> dict[str, Any]:
    document: dict[str, Any] = {"cpu": cell.cpu, "state": cell.state.value}
    if cell.label:
        document["label"] = cell.label
    if cell.uses:
        document["uses"] = cell.uses
    return document


def _first(cpus: int) -> int:
    return (cpus & -cpus).bit_length()
