"""The core map of a machine: nested boxes down to every hardware thread.

The boxes nest as in lstopo: socket, NUMA node, L3, core, thread. Terminal, SVG, JSON and web pages draw the
same values. VMs have letters, so that a map is readable without colours and on paper. The levels of a real
machine need not nest: each box holds the part of its level that lies in the box around it. A NUMA node on two
sockets is drawn in both, marked as a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import permutations
from types import MappingProxyType

from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, place_of_each
from kvplace.core.device_locality import LocatedDevice, device_phrases
from kvplace.core.drawing.occupancy import Fault, FaultKind, Occupancy
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.node_devices import DeviceCount
from kvplace.core.placement import Placement
from kvplace.core.quantity import bytes_in_pages, counted, format_bytes
from kvplace.core.scalars import (
    NO_BYTES,
    NO_CPUS,
    Bytes,
    CpuId,
    CpuMask,
    NumaId,
    PackageId,
    PodUid,
    ResourceName,
)
from kvplace.core.topology import NumaNode, Topology


class ThreadState(Enum):
    """The use of a hardware thread."""

    FREE = "free"
    ISOLATED = "isolated"
    """Free, and isolated by the kernel (isolcpus)."""
    RESERVED = "reserved"
    FOREIGN = "foreign"
    """In use outside of kvplace, for instance by the kubelet's static policy."""
    OWNED = "owned"
    IDLE = "idle"
    """Owned, and kept idle by its owner: the sibling of an isolated vCPU."""
    EMULATOR = "emulator"
    """Owned, with the emulator and I/O threads of its owner's QEMU, but none of its vCPUs."""
    KEPT = "kept"
    """Owned by a VM that waits while other VMs make room for it: nothing runs here."""
    SHARED = "shared"


MEANINGS = {
    ThreadState.OWNED: "owned by VM {0}",
    ThreadState.IDLE: "kept idle by VM {0}",
    ThreadState.EMULATOR: "for QEMU's own threads of VM {0}",
    ThreadState.KEPT: "kept for VM {0}, which waits",
    ThreadState.SHARED: "shared, used by VM {0}",
    ThreadState.FREE: "free",
    ThreadState.ISOLATED: "free, isolated by the kernel",
    ThreadState.RESERVED: "reserved for the host",
    ThreadState.FOREIGN: "in use outside of kvplace",
}
"""The text of the key for each state, in the order of the key; {0} stands for the letters of the VM."""


_WORDS = {ThreadState.KEPT: "kept for VMs that wait"}
"""States that a summary does not call by their names."""


@dataclass(frozen=True, slots=True)
class Thread:
    """One hardware thread."""

    cpu: CpuId
    state: ThreadState
    vms: tuple[str, ...] = ()
    """Letters of the VMs that own or share it; more than one owner is a conflict."""
    strays: tuple[str, ...] = ()
    """Letters of the VMs with threads that may run here, but are not placed here."""
    fault: FaultKind | None = None
    qemu: tuple[str, ...] = ()
    """Letters of the VMs with emulator or I/O threads here, beside vCPUs or not."""


@dataclass(frozen=True, slots=True)
class CoreBox:
    """The threads of one core, ascending."""

    threads: tuple[Thread, ...]
    part: bool = False
    """Whether other threads of the core are in another box; the larger boxes have the same mark."""


@dataclass(frozen=True, slots=True)
class L3Box:
    """An L3 group, by its index in the topology."""

    index: int
    cores: tuple[CoreBox, ...]
    part: bool = False

    @property
    def cpus(self) -> CpuMask:
        """The set of its threads."""
        return mask_of(thread.cpu for core in self.cores for thread in core.threads)


@dataclass(frozen=True, slots=True)
class NodeBox:
    """A NUMA node with its memory in bytes."""

    id: NumaId
    memory: Bytes
    """All of it, huge pages included; 0 when the machine does not report it."""
    free_memory: Bytes
    """Bytes outside huge pages that no VM claims."""
    huge_pages: Mapping[Bytes, tuple[int, int]]
    """(Free, all) by page size in bytes."""
    l3_groups: tuple[L3Box, ...]
    part: bool = False
    distances: Mapping[NumaId, int] = field(default_factory=lambda: MappingProxyType({}))
    """Distance to the other nodes, as far as the machine reports it."""
    devices: Mapping[ResourceName, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    """(Free, all) devices of each resource, as far as the agent reports them."""

    @property
    def free_resources(self) -> tuple[str, ...]:
        """Phrases for the free memory, the huge pages of each size, and the free devices."""
        in_pages = bytes_in_pages({size: count for size, (_, count) in self.huge_pages.items()})
        plain = max(NO_BYTES, self.memory - in_pages)
        size, unit = _unit(plain)
        memory = f"{self.free_memory / size:.0f} of {plain / size:.0f} {unit} free"
        devices = (f"{free} of {total} {resource} free" for resource, (free, total) in self.devices.items())
        return (memory if self.memory else "memory unknown", *self._set_aside(), *devices)

    def _set_aside(self) -> Iterator[str]:
        for page, (free, count) in self.huge_pages.items():
            if count:
                size, unit = _unit(page * count)
                pages = f"{free} of {counted(count, 'huge page')} of {format_bytes(page)} free"
                yield f"{page * count / size:.0f} {unit} set aside: {pages}"


def _unit(memory: int) -> tuple[int, str]:
    return (1 << 30, "GiB") if memory >= 1 << 30 else (1 << 20, "MiB")


@dataclass(frozen=True, slots=True)
class PackageBox:
    """A socket."""

    id: PackageId
    nodes: tuple[NodeBox, ...]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """The VM of some letters."""

    label: str
    claim: Claim
    placement: Placement | None = None
    """Where the threads of its QEMU run; None where only the claim is known."""
    devices: tuple[LocatedDevice, ...] = ()
    """As far as its agent reports them."""

    @property
    def qemu_threads(self) -> str:
        """State in a phrase where its emulator and I/O threads run; nothing where that is not known."""
        if self.placement is None or not self.placement.emulator_cpus:
            return ""
        emulator = format_cpu_list(self.placement.emulator_cpus)
        io_threads = self.io_thread_cpus
        if io_threads in ("", emulator):
            return f"emulator{', I/O' if io_threads else ''} {emulator}"
        return f"emulator {emulator}; I/O {io_threads}"

    @property
    def beside_cpus(self) -> str:
        """State in phrases where the threads of its QEMU run and where its devices are; may be empty."""
        return "; ".join(filter(None, (self.qemu_threads, *device_phrases(self.devices))))

    @property
    def io_thread_cpus(self) -> str:
        """Write the different CPU sets of its I/O threads."""
        sets = self.placement.io_thread_cpus if self.placement is not None else ()
        return " / ".join(dict.fromkeys(map(format_cpu_list, sets)))


@dataclass(frozen=True, slots=True)
class CoreMap:
    """The core map of one machine."""

    name: str
    packages: tuple[PackageBox, ...]
    memory_only: tuple[NodeBox, ...]
    """NUMA nodes without CPUs."""
    legend: tuple[LegendEntry, ...]
    faults: tuple[Fault, ...] = ()

    @property
    def threads(self) -> Iterator[Thread]:
        """All threads, in the order of the drawing."""
        for core in self.cores:
            yield from core.threads

    @property
    def cores(self) -> Iterator[CoreBox]:
        """All cores, or parts of cores, in the order of the drawing."""
        for package in self.packages:
            for node in package.nodes:
                for l3 in node.l3_groups:
                    yield from l3.cores

    def count(self, state: ThreadState) -> int:
        """Count the threads in a state."""
        return sum(1 for thread in self.threads if thread.state is state)

    @property
    def summary(self) -> str:
        """The number of threads in each state, in one line."""
        threads = list(self.threads)
        parts = [counted(len(threads), "CPU")]
        parts += [
            f"{count} {_WORDS.get(state, state.value)}"
            for state in ThreadState
            if (count := self.count(state))
        ]
        for kind in FaultKind:
            if count := sum(thread.fault is kind for thread in threads):
                parts.append(f"{count} in {kind.value}")
        return ", ".join(parts)


def draw(
    name: str,
    topology: Topology,
    ledger: Ledger | None = None,
    *,
    foreign: CpuMask = NO_CPUS,
    found: Mapping[PodUid, CpuMask] = MappingProxyType({}),
    placements: Mapping[PodUid, Placement] = MappingProxyType({}),
    counts: Iterable[DeviceCount] = (),
    devices: Mapping[PodUid, tuple[LocatedDevice, ...]] = MappingProxyType({}),
) -> CoreMap:
    """Make the core map of a machine from its ledger.

    `foreign`, `found` and `placements` are as in `Occupancy`; `counts` are the devices of the node, and
    `devices` the devices of each VM. Contradictions are drawn and marked as faults.
    VMs get their letters in the order of the lowest CPU that they use: the letters follow the drawing.
    """
    occupancy = Occupancy(topology, ledger if ledger is not None else Ledger(), foreign, found, placements)
    painter = _Painter(occupancy, tuple(counts))
    return CoreMap(
        name=name,
        packages=tuple(
            PackageBox(package.id, tuple(painter.nodes_in(package.cpus))) for package in topology.packages
        ),
        memory_only=tuple(painter.node(node, NO_CPUS) for node in topology.numa_nodes if not node.cpus),
        legend=tuple(
            LegendEntry(
                occupancy.labels[claim.uid], claim, placements.get(claim.uid), devices.get(claim.uid, ())
            )
            for claim in occupancy.claims
        ),
        faults=occupancy.faults,
    )


class _Painter:
    def __init__(self, occupancy: Occupancy, counts: tuple[DeviceCount, ...]) -> None:
        self._counts = counts
        self._topology = occupancy.topology
        self._ledger = occupancy.ledger
        self._occupancy = occupancy
        self._node_of = place_of_each([node.cpus for node in self._topology.numa_nodes])
        self._l3_of = place_of_each(self._topology.l3_groups)
        self._core_of = place_of_each(self._topology.cores)
        self._working = 0
        self._kept = 0
        for claim in occupancy.claims:
            if claim.reserved is None:
                self._working |= claim.cpus & claim.owned
            else:
                self._kept |= claim.owned

    def nodes_in(self, cpus: CpuMask) -> Iterator[NodeBox]:
        nodes = self._topology.numa_nodes
        for index in self._touched(self._node_of, cpus):
            yield self.node(nodes[index], nodes[index].cpus & cpus)

    def node(self, node: NumaNode, cpus: CpuMask) -> NodeBox:
        l3s = self._topology.l3_groups
        in_pages = bytes_in_pages(node.huge_pages)
        claimed = self._ledger.plain_memory.get(node.id, NO_BYTES)
        pages = self._ledger.huge_pages
        return NodeBox(
            id=node.id,
            memory=node.memory,
            free_memory=max(NO_BYTES, node.memory - in_pages - claimed),
            huge_pages={
                size: (max(0, count - pages.get((node.id, size), 0)), count)
                for size, count in sorted(node.huge_pages.items())
            },
            l3_groups=tuple(
                L3Box(index, tuple(self._cores_in(l3s[index] & cpus)), part=bool(l3s[index] & ~cpus))
                for index in self._touched(self._l3_of, cpus)
            ),
            part=cpus != node.cpus,
            distances=node.distances,
            devices={one.resource: (one.free, one.total) for one in self._counts if one.node == node.id},
        )

    def _cores_in(self, cpus: CpuMask) -> Iterator[CoreBox]:
        for index in self._touched(self._core_of, cpus):
            core = self._topology.cores[index]
            yield CoreBox(tuple(map(self._thread, cpus_of(core & cpus))), part=bool(core & ~cpus))

    def _touched(self, set_of: Mapping[CpuId, int], cpus: CpuMask) -> list[int]:
        """The indexes of the sets that some CPUs belong to, ascending."""
        return sorted({set_of[cpu] for cpu in cpus_of(cpus)})

    def _thread(self, cpu: CpuId) -> Thread:
        occupancy, labels = self._occupancy, self._occupancy.labels
        holders = occupancy.holders.get(cpu, ())
        fault = next((kind for kind in FaultKind if occupancy.faulty[kind] >> cpu & 1), None)
        return Thread(
            cpu,
            self._state(cpu),
            tuple(labels[uid] for uid in (*holders, *occupancy.sharers.get(cpu, ()))),
            tuple(labels[uid] for uid in occupancy.strays.get(cpu, ())),
            fault,
            tuple(labels[uid] for uid in occupancy.qemu.get(cpu, ())),
        )

    def _state(self, cpu: CpuId) -> ThreadState:
        if cpu in self._occupancy.holders:
            if self._occupancy.qemu_alone >> cpu & 1:
                return ThreadState.EMULATOR
            if self._kept >> cpu & 1 and not self._working >> cpu & 1:
                return ThreadState.KEPT
            return ThreadState.OWNED if self._working >> cpu & 1 else ThreadState.IDLE
        for state, cpus in (
            (ThreadState.FOREIGN, self._occupancy.foreign),
            (ThreadState.SHARED, int(cpu in self._occupancy.sharers) << cpu),
            (ThreadState.RESERVED, self._topology.reserved),
            (ThreadState.ISOLATED, self._topology.isolated),
        ):
            if cpus >> cpu & 1:
                return state
        return ThreadState.FREE


TITLE = "NUMA distances:"
_INSIDE, _BETWEEN, _WITHOUT = "inside a socket", "between sockets", "to nodes without CPUs"


def distance_phrases(drawing: CoreMap) -> tuple[str, ...]:
    """Give phrases to be read after TITLE; none with one node or without known distances."""
    distances = {
        node.id: node.distances
        for nodes in (*(package.nodes for package in drawing.packages), drawing.memory_only)
        for node in nodes
    }
    sockets: dict[NumaId, set[PackageId]] = {number: set() for number in distances}
    for package in drawing.packages:
        for node in package.nodes:
            sockets[node.id].add(package.id)
    found: dict[str, set[int | None]] = {}
    for one, other in permutations(distances, 2):
        relation = _relation(sockets[one], sockets[other])
        found.setdefault(relation, set()).add(distances[one].get(other))
    values = {relation: next(iter(each)) for relation, each in found.items() if len(each) == 1}
    if len(values) == len(found) and None not in values.values():
        return tuple(
            f"{values[relation]} {relation}"
            for relation in (_INSIDE, _BETWEEN, _WITHOUT)
            if relation in values
        )
    return tuple(_by_node(distances))


def _relation(one: set[PackageId], other: set[PackageId]) -> str:
    if not one or not other:
        return _WITHOUT
    return _INSIDE if one & other else _BETWEEN


def _by_node(distances: Mapping[NumaId, Mapping[NumaId, int]]) -> Iterator[str]:
    for one in sorted(distances):
        others = {other: value for other, value in distances[one].items() if other in distances}
        others.pop(one, None)
        nodes = {
            value: format_cpu_list(mask_of(other for other in others if others[other] == value))
            for value in sorted(set(others.values()))
        }
        if nodes:
            yield f"from {one}: {'; '.join(f'{value} to {ids}' for value, ids in nodes.items())}"
