"""CPUs and memory that a machine has available for one request, counted in the request's own unit.

The unit is a CPU; with `smt: isolate` it is a whole free core with one used thread. With
`smt: require` only CPUs of whole free cores count. Counts of segments and cores are cached with the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from itertools import accumulate

from kvplace.core.allocator.device_choices import ANYWHERE, DeviceChoice, device_choices
from kvplace.core.allocator.layout import L3Part, NodePart, PartCount, ScopeDomain, Segment, layout_of
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import Free
from kvplace.core.quantity import plain_bytes
from kvplace.core.request import EmulatorThreads, NumaMemory, Policy, Request, Smt
from kvplace.core.scalars import Bytes, CpuMask, NumaIndex
from kvplace.core.search_budget import SearchBudget
from kvplace.core.topology import Topology

_NUMA_STEPS = 100_000
"""Steps of all searches for sets of NUMA nodes of one question."""

_UNITS = {smt: number for number, smt in enumerate(Smt)}
"""Numbers for the kinds of units: much cheaper as keys than the enum values."""


def units_needed(request: Request) -> int:
    """How many units a request takes: its vCPUs, and one for an emulator that has its own."""
    isolated_emulator = request.options.emulator_threads is EmulatorThreads.ISOLATE
    return request.vcpus + (isolated_emulator and request.options.policy is not Policy.NUMA)


def counted_unit(request: Request) -> Smt:
    """The unit of a request; CPUs of a pool of NUMA nodes are counted one by one."""
    return request.options.smt if request.options.policy is not Policy.NUMA else Smt.PREFER


def cpus_owned(topology: Topology, request: Request) -> int | None:
    """How many CPUs a VM will own on a machine; None where that depends on the choice of its cores."""
    need, unit = units_needed(request), counted_unit(request)
    if not request.owns_cpus:
        return None
    if unit is Smt.PREFER:
        return need
    if len(topology.thread_counts) != 1:
        return None
    (threads,) = topology.thread_counts
    cores = need if unit is Smt.ISOLATE else -(-need // threads)
    return cores * threads


class AvailableUnits:
    """One machine, its free resources, and the request that they are counted for."""

    def __init__(self, topology: Topology, free: Free, request: Request) -> None:
        self.topology = topology
        self.layout = layout_of(topology)
        self.free = free
        self.request = request
        self.need = units_needed(request)
        self.cpus = free.cpus if request.owns_cpus else free.pool
        self.smt = counted_unit(request)
        self._unit = _UNITS[self.smt]
        self.spreads = request.options.scope.evenly
        self.uses = dict(free.uses) if not request.owns_cpus else {}
        self.budget = SearchBudget(_NUMA_STEPS)
        """For the search for sets of NUMA nodes."""
        self.unknown_devices = ""
        """The reason why no placement can be beside the devices."""
        self.device_choices = ANYWHERE
        if request.devices or request.device_nodes:
            found = device_choices(topology, free.devices, request)
            self.unknown_devices = found if isinstance(found, str) else ""
            self.device_choices = () if isinstance(found, str) else found
        self._segment_uses: dict[int, list[int]] = {}
        self._l3_parts, self._parts = self.layout.l3_parts, self.layout.part_counts
        counts_memory = bool(
            free.memory and request.memory and request.options.numa_memory is not NumaMemory.OFF
        )
        self.small_memory = plain_bytes(request.memory, request.huge_pages) if counts_memory else 0
        self.counts_memory = counts_memory
        self.needs_memory = bool(self.small_memory or request.huge_pages)
        """Whether memory or huge pages restrict the choice of NUMA nodes."""
        self._memory: list[int] = []
        self._pages: dict[Bytes, list[int]] = {}
        if self.needs_memory:
            by_id = {node.id: index for index, node in enumerate(topology.numa_nodes)}
            self._memory = [0] * len(by_id)
            for node, count in free.memory:
                self._memory[by_id[node]] = max(0, count)
            self._pages = {size: [0] * len(by_id) for size in request.huge_pages}
            for node, size, pages in free.huge_pages:
                if size in self._pages:
                    self._pages[size][by_id[node]] = max(0, pages)

    def without_devices(self) -> AvailableUnits:
        """The same for a VM without devices."""
        other = copy(self)
        other.unknown_devices, other.device_choices = "", ANYWHERE
        return other

    def without_memory(self, beside: tuple[frozenset[NumaIndex], ...]) -> AvailableUnits:
        """The same for CPUs alone, beside devices; it has its budget in common with this one."""
        other = copy(self)
        other.device_choices = (DeviceChoice(0, beside),)
        other.needs_memory = other.counts_memory = False
        other.small_memory = 0
        return other

    # CPUs.

    def l3_part(self, segments: Sequence[Segment]) -> L3Part:
        """Count the segments of one L3 group together."""
        if len(segments) == 1:
            return self._count(segments[0])
        counted = [self._count(segment) for segment in segments]
        cores = sorted([core for one in counted for core in one.cores], key=lambda core: -core[1])
        kind_of = {
            core: kind for one in counted for (core, _), kind in zip(one.cores, one.kinds, strict=False)
        }
        kinds = tuple([kind_of[core] for core, _ in cores]) if kind_of else ()
        widths = tuple([units for _, units in cores])
        return L3Part(sum(widths), tuple(cores), widths, kinds)

    def l3_parts_of(self, segments: Sequence[Segment]) -> list[L3Part]:
        """Count segments by their L3 group."""
        by_node: Counter[NumaIndex] = Counter()
        for segment in segments:
            by_node[segment.node] += self._count(segment).units
        by_l3: dict[int, list[Segment]] = {}
        # As with L3 groups, the largest NUMA nodes are used up, and the smallest keeps the rest.
        for segment in sorted(segments, key=lambda segment: -by_node[segment.node]):
            by_l3.setdefault(segment.l3, []).append(segment)
        return [self.l3_part(group) for group in by_l3.values()]

    def count(self, part: NodePart) -> PartCount:
        """Count a part of a NUMA node."""
        available = self.cpus & part.cpus
        key = (part.cpus, available, self._unit)
        known = self._parts.get(key)
        if known is None:
            l3_parts = tuple(self._count(segment) for segment in part.segments)
            widths = sorted((width for one in l3_parts for width in one.widths), reverse=True)
            known = self._parts[key] = PartCount(
                sum(one.units for one in l3_parts),
                l3_parts,
                tuple(
                    sorted(
                        (segment.shared_l3, one.widths, one.kinds)
                        for segment, one in zip(part.segments, l3_parts, strict=True)
                    )
                ),
                tuple(accumulate(sorted((one.units for one in l3_parts), reverse=True))),
                tuple(accumulate(widths)),
            )
        return known

    def units(self, part: NodePart) -> int:
        """How many units lie in a part of a NUMA node."""
        if self.smt is Smt.PREFER:
            return (self.cpus & part.cpus).bit_count()
        return self.count(part).units

    def units_in(self, domain: ScopeDomain) -> int:
        """How many units lie in a domain."""
        if self.smt is Smt.PREFER:
            return (self.cpus & domain.cpus).bit_count()
        return sum(self.units(part) for part in domain.parts)

    def segment_units(self, segments: Iterable[Segment]) -> int:
        """How many units lie in segments."""
        if self.smt is Smt.PREFER:
            return sum([(self.cpus & segment.cpus).bit_count() for segment in segments])
        return sum(self._count(segment).units for segment in segments)

    def devices_at(self, node: NumaIndex) -> tuple[int, ...]:
        """Differences of NUMA nodes in devices, if the VM has any."""
        if self.device_choices is ANYWHERE:
            return ()
        return tuple(
            [
                number
                for number, choice in enumerate(self.device_choices)
                if any(node in nodes for nodes in choice.beside)
            ]
        )

    def is_beside(self, parts: Iterable[NodePart], beside: Sequence[frozenset[NumaIndex]]) -> bool:
        """Whether parts of NUMA nodes can give a CPU beside each device."""
        if not beside:
            return True
        nodes = {part.node for part in parts if self.units(part)}
        return len(beside) <= self.need and not any(nodes.isdisjoint(near) for near in beside)

    def uses_of(self, segment: Segment) -> Sequence[int]:
        """How many VMs name each of the CPUs of the pool in a segment."""
        if segment.cpus not in self._segment_uses:
            pool = cpus_of(self.free.pool & segment.cpus)
            self._segment_uses[segment.cpus] = [self.uses.get(cpu, 0) for cpu in pool]
        return self._segment_uses[segment.cpus]

    def _count(self, segment: Segment) -> L3Part:
        available = self.cpus & segment.cpus
        key = (segment.cpus, available, self._unit)
        known = self._l3_parts.get(key)
        if known is None:
            known = self._l3_parts[key] = _counted(segment, available, self.smt)
        return known

    # Memory.

    def memory_of(self, node: NumaIndex) -> int:
        """Free bytes outside huge pages of a NUMA node, by its index; 0 when they do not matter here."""
        return self._memory[node] if self.needs_memory else 0

    def pages_of(self, node: NumaIndex, size: Bytes) -> int:
        """Free huge pages of a size of a NUMA node, by its index."""
        return self._pages[size][node] if self.needs_memory else 0

    def amounts_at(self, node: NumaIndex) -> tuple[int, ...]:
        """Differences of NUMA nodes in memory and huge pages, if the request needs any."""
        return (self._memory[node], *[of[node] for of in self._pages.values()]) if self._memory else ()

    def far_bytes(self, nodes: Collection[NumaIndex]) -> int:
        """How much of the memory and huge pages these NUMA nodes cannot give."""
        sizes = (1, *self.request.huge_pages)
        return sum(
            max(0, need - sum(amounts)) * size
            for size, (amounts, need) in zip(sizes, self.amounts_of(nodes), strict=True)
        )

    def memory_fits(self, nodes: Collection[NumaIndex]) -> bool:
        """Whether NUMA nodes together have the memory and the huge pages."""
        return all(sum(amounts) >= need for amounts, need in self.amounts_of(nodes))

    def amounts_of(self, nodes: Collection[NumaIndex]) -> list[tuple[list[int], int]]:
        """Memory and huge pages of each size of NUMA nodes, each with the need."""
        if not self.needs_memory:
            return []
        found = [([self._memory[node] for node in nodes], self.small_memory)]
        for size, count in self.request.huge_pages.items():
            found.append(([self._pages[size][node] for node in nodes], count))
        return found


def _counted(segment: Segment, available: CpuMask, smt: Smt) -> L3Part:
    if smt is Smt.PREFER:
        counted = [(core, core & available) for core in segment.cores if core & available]
        cores = [(core, cpus, cpus.bit_count()) for core, cpus in counted]
    else:
        cores = [
            (core, core, 1 if smt is Smt.ISOLATE else core.bit_count())
            for core in segment.whole_cores
            if not core & ~available
        ]
    cores.sort(key=lambda core: -core[2])
    widths = tuple([units for _, _, units in cores])
    kinds = tuple([segment.kinds[core] for core, _, _ in cores]) if segment.kinds else ()
    return L3Part(sum(widths), tuple([(cpus, units) for _, cpus, units in cores]), widths, kinds)
