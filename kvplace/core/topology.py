"""The parts of one machine, as sets of CPUs.

Packages, NUMA nodes, L3 groups and cores are each a set of CPUs; nothing is derived from id
arithmetic, and the levels need not nest (a NUMA node may span packages, a package may span nodes).
A level that the machine does not report collapses to the next coarser one before it gets here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import MappingProxyType

from kvplace.core.cpuset import cpus_of, format_cpu_list, place_of_each
from kvplace.core.errors import BadTopology
from kvplace.core.quantity import plain_bytes
from kvplace.core.scalars import NO_BYTES, NO_CPUS, Bytes, CpuId, CpuMask, NumaId, PackageId


@dataclass(frozen=True, slots=True)
class Package:
    """One socket, with the number that Linux gives it."""

    id: PackageId
    cpus: CpuMask


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node; without CPUs when it is only memory, without memory when it is only CPUs."""

    id: NumaId
    cpus: CpuMask
    memory: Bytes
    """Bytes in all, huge pages included."""
    huge_pages: Mapping[Bytes, int] = field(default_factory=lambda: MappingProxyType({}))
    """Pages by page size in bytes."""
    distances: Mapping[NumaId, int] = field(default_factory=lambda: MappingProxyType({}))
    """SLIT distance to other nodes by their id, as the machine reports it: perhaps not to all nodes, and
    perhaps another value in the other direction (`Topology.distance` combines both)."""


@dataclass(frozen=True)
class Topology:
    """A validated machine: every CPU has one package, one NUMA node, one L3 group and one core.

    `reserved` CPUs are never given out exclusively; they are the floor of the shared pool.
    """

    packages: tuple[Package, ...]
    numa_nodes: tuple[NumaNode, ...]
    l3_groups: tuple[CpuMask, ...]
    cores: tuple[CpuMask, ...]
    """Sibling sets, kept in the order of their lowest CPUs however they were given."""
    reserved: CpuMask = NO_CPUS
    isolated: CpuMask = NO_CPUS
    withheld: CpuMask = NO_CPUS
    """Other CPUs that the node does not give out now: not in its `cpu-map`, or held by the kubelet.

    They are not part of the fingerprint, so a VM that runs on them stays.
    """

    def __post_init__(self) -> None:
        """Raise BadTopology, naming the level and the CPUs, when a level is not a partition."""
        if not self.cpus:
            raise BadTopology("the machine has no cores: give at least one core with its CPUs")
        everything = self.cpus
        for level, sets in (
            ("cores", self.cores),
            ("l3Groups", self.l3_groups),
            ("numaNodes", tuple(node.cpus for node in self.numa_nodes)),
            ("packages", tuple(package.cpus for package in self.packages)),
        ):
            _check_partition(level, sets, everything)
        object.__setattr__(self, "cores", tuple(sorted(self.cores, key=lambda core: core & -core)))
        for name, ids in (
            ("numaNodes", [node.id for node in self.numa_nodes]),
            ("packages", [package.id for package in self.packages]),
        ):
            if len(set(ids)) != len(ids):
                raise BadTopology(f"{name} has the same id twice: {sorted(ids)}")
        for name, mask in (("reserved", self.reserved), ("isolated", self.isolated)):
            if mask & ~everything:
                raise BadTopology(
                    f"{name} names CPUs that the machine does not have: {format_cpu_list(mask & ~everything)}"
                )

    @cached_property
    def cpus(self) -> CpuMask:
        """All CPUs of the machine."""
        union = NO_CPUS
        for core in self.cores:
            union |= core
        return union

    @cached_property
    def allocatable(self) -> CpuMask:
        """The CPUs that may be given out: all but the reserved and the withheld ones."""
        return CpuMask(self.cpus & ~self.reserved & ~self.withheld)

    def giving_out(self, cpus: CpuMask) -> Topology:
        """Return the machine that gives out no CPUs but these; the last 1,024 results are kept."""
        return self if not self.allocatable & ~cpus else _giving_out(self, CpuMask(self.allocatable & cpus))

    @cached_property
    def plain_memory(self) -> Mapping[NumaId, Bytes]:
        """Bytes outside huge pages by NUMA node; 0 where a node reports none."""
        return {
            node.id: plain_bytes(node.memory, node.huge_pages) if node.memory else NO_BYTES
            for node in self.numa_nodes
        }

    @cached_property
    def core_of(self) -> Mapping[CpuId, CpuMask]:
        """The sibling set of each CPU, by CPU id."""
        return {cpu: core for core in self.cores for cpu in cpus_of(core)}

    @cached_property
    def sockets(self) -> tuple[Package, ...]:
        """The packages; where each is one core, the NUMA nodes; where each of these is too, the machine.

        Hypervisors make such packages by default, as do s390x and POWER: they state nothing about distance.
        """
        if self.socket_noun == "socket":
            return self.packages
        if self.socket_noun == "machine":
            return (Package(PackageId(0), self.cpus),)
        return tuple(Package(PackageId(node.id), node.cpus) for node in self.numa_nodes if node.cpus)

    @cached_property
    def socket_noun(self) -> str:
        """The level that counts as socket: `socket`, `NUMA node` or `machine`."""
        cores = set(self.cores)
        if len(cores) == 1 or {package.cpus for package in self.packages} != cores:
            return "socket"
        return "machine" if {node.cpus for node in self.numa_nodes if node.cpus} == cores else "NUMA node"

    @cached_property
    def kind_of_core(self) -> Mapping[CpuMask, int]:
        """The kind of each core on hybrid machines: its number of threads."""
        return {core: core.bit_count() for core in self.cores}

    @cached_property
    def thread_counts(self) -> frozenset[int]:
        """The numbers of threads that its cores have: one number unless the machine is hybrid."""
        return frozenset(self.kind_of_core.values())

    @cached_property
    def undivided_cores(self) -> tuple[CpuMask, ...]:
        """The cores that lie in one package, one NUMA node and one L3 group, as all cores should."""
        levels = [
            place_of_each(sets)
            for sets in (
                self.l3_groups,
                [node.cpus for node in self.numa_nodes],
                [package.cpus for package in self.packages],
            )
        ]
        return tuple(
            core
            for core in self.cores
            if all(len({place[cpu] for cpu in cpus_of(core)}) == 1 for place in levels)
        )

    @cached_property
    def package_of(self) -> Mapping[CpuId, PackageId]:
        """The number of the package of each CPU, by CPU id."""
        return {cpu: package.id for package in self.packages for cpu in cpus_of(package.cpus)}

    @cached_property
    def node_by_id(self) -> Mapping[NumaId, NumaNode]:
        """NUMA nodes by their id."""
        return {node.id: node for node in self.numa_nodes}

    @cached_property
    def fingerprint(self) -> str:
        """A short name of everything that matters for placing: equal machines have equal ones."""
        canonical = json.dumps(
            [
                [[p.id, f"{p.cpus:x}"] for p in self.packages],
                [
                    [n.id, f"{n.cpus:x}", n.memory, sorted(n.huge_pages.items()), sorted(n.distances.items())]
                    for n in self.numa_nodes
                ],
                [f"{mask:x}" for mask in self.l3_groups],
                [f"{mask:x}" for mask in self.cores],
                f"{self.reserved:x}",
                f"{self.isolated:x}",
            ],
            separators=(",", ":"),
        )
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @cached_property
    def shape(self) -> str:
        """A short name of the machine without its memory: nodes of one type differ in nothing else."""
        shape = (
            [(package.id, package.cpus) for package in self.packages],
            [(node.id, node.cpus, sorted(node.distances.items())) for node in self.numa_nodes],
            self.l3_groups,
            self.cores,
        )
        return hashlib.sha256(repr(shape).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @cached_property
    def _cores_in(self) -> dict[CpuMask, tuple[CpuMask, ...]]:
        return {}

    @cached_property
    def _l3_in(self) -> dict[CpuMask, tuple[CpuMask, ...]]:
        return {}

    def cores_in(self, cpus: CpuMask) -> tuple[CpuMask, ...]:
        """The parts of cores that lie in a set of CPUs; cached, so only for the machine's own levels."""
        if cpus not in self._cores_in:
            self._cores_in[cpus] = tuple(core & cpus for core in self.cores if core & cpus)
        return self._cores_in[cpus]

    def l3_in(self, cpus: CpuMask) -> tuple[CpuMask, ...]:
        """The parts of L3 groups that lie in a set of CPUs; cached as in `cores_in`."""
        if cpus not in self._l3_in:
            self._l3_in[cpus] = tuple(l3 & cpus for l3 in self.l3_groups if l3 & cpus)
        return self._l3_in[cpus]

    def nodes_of(self, cpus: CpuMask) -> tuple[NumaId, ...]:
        """The ids of the NUMA nodes that a set of CPUs touches, in the machine's order."""
        return tuple(node.id for node in self.numa_nodes if node.cpus & cpus)

    def packages_of(self, cpus: CpuMask) -> tuple[PackageId, ...]:
        """The numbers of the packages that a set of CPUs touches, in the machine's order."""
        return tuple(package.id for package in self.packages if package.cpus & cpus)

    def distance(self, first: NumaId, second: NumaId) -> int:
        """The larger of the two directions' distances between NUMA nodes; 10 to itself, 20 when unknown."""
        if first == second:
            return self.node_by_id[first].distances.get(first, 10)
        there = self.node_by_id[first].distances.get(second, 0)
        back = self.node_by_id[second].distances.get(first, 0)
        return max(there, back) or 20


def _check_partition(level: str, sets: tuple[CpuMask, ...], everything: CpuMask) -> None:
    seen = NO_CPUS
    for cpus in sets:
        if cpus & seen:
            raise BadTopology(f"{level} lists CPU {format_cpu_list(cpus & seen)} more than once")
        seen |= cpus
    if seen != everything:
        missing, foreign = everything & ~seen, seen & ~everything
        if missing:
            raise BadTopology(f"{level} leaves out CPU {format_cpu_list(missing)}, which cores lists")
        raise BadTopology(f"{level} lists CPU {format_cpu_list(foreign)}, which no core has")


@lru_cache(maxsize=1024)
def _giving_out(topology: Topology, cpus: CpuMask) -> Topology:
    return replace(topology, withheld=CpuMask(topology.cpus & ~topology.reserved & ~cpus))


def topology_of_cpu_map(sockets: Mapping[PackageId, CpuMask]) -> Topology:
    """Make the topology of a node that only has a hand-written `cpu-map`.

    Each socket counts as one NUMA node and one L3 group, each CPU as a core (design section 2); memory
    is unknown and therefore not counted.
    """
    ordered = sorted((number, cpus) for number, cpus in sockets.items() if cpus)
    return Topology(
        packages=tuple(Package(number, cpus) for number, cpus in ordered),
        numa_nodes=tuple(NumaNode(NumaId(number), cpus, memory=NO_BYTES) for number, cpus in ordered),
        l3_groups=tuple(cpus for _, cpus in ordered),
        cores=tuple(CpuMask(1 << cpu) for _, cpus in ordered for cpu in cpus_of(cpus)),
    )
