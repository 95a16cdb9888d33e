"""What a machine can give to one request, counted in the request's own unit.

The unit is a CPU; with `smt: isolate` it is a whole free core, of which one thread is used. With
`smt: require` only CPUs of whole free cores count. Cells and cores are counted once for every state they
are found in, and remembered with the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from kvplace.core.allocator.layout import Bin, Cell, Domain, NodePart, PartCount, layout_of
from kvplace.core.allocator.least_used import Usage
from kvplace.core.cpuset import cpus_of
from kvplace.core.free import Free
from kvplace.core.request import EmulatorThreads, NumaMemory, Policy, Request, Scope, Smt
from kvplace.core.topology import Topology

if TYPE_CHECKING:
    from kvplace.core.allocator.core_choice import CoreChoice

_UNITS = {smt: number for number, smt in enumerate(Smt)}
"""Numbers for what is counted: as keys much cheaper than the words themselves."""


class Supply:
    """One machine, what is free on it, and the request that it is counted for."""

    def __init__(self, topology: Topology, free: Free, request: Request) -> None:
        self.topology = topology
        self.layout = layout_of(topology)
        self.free = free
        self.request = request
        isolated_emulator = request.options.emulator_threads is EmulatorThreads.ISOLATE
        self.need = request.vcpus + (isolated_emulator and request.options.policy is not Policy.NUMA)
        self.cpus = free.cpus if request.owns_cpus else free.pool
        self.smt = request.options.smt if request.options.policy is not Policy.NUMA else Smt.PREFER
        self._unit = _UNITS[self.smt]
        self.spreads = request.options.scope in (Scope.SPREAD_SOCKETS, Scope.SPREAD_NUMA)
        self.uses = dict(free.uses) if not request.owns_cpus else {}
        self._by_package: dict[int, Mapping[int, int]] = {}
        self._cell_uses: dict[int, list[int]] = {}
        self.usage = Usage(self.uses) if self.uses else None
        self.shares: dict[Hashable, CoreChoice | None] = {}
        """What was chosen in groups of cells, for regions that have such groups in common."""
        self.least_of_shares: dict[Hashable, tuple[tuple[int, int], tuple[int, int] | None]] = {}
        """What shares from such groups take at least, of L3 groups and of cores, and with one unit more."""
        self._bins, self._parts = self.layout.bins, self.layout.part_counts
        counts_memory = bool(
            free.memory and request.memory and request.options.numa_memory is not NumaMemory.OFF
        )
        pages_bytes = sum(size * count for size, count in request.huge_pages.items())
        self.small_memory = max(0, request.memory - pages_bytes) if counts_memory else 0
        self.counts_memory = counts_memory
        self.needs_memory = bool(self.small_memory or request.huge_pages)
        """Whether memory or huge pages restrict the choice of NUMA nodes."""
        if self.needs_memory:
            by_id = {node.id: index for index, node in enumerate(topology.numa_nodes)}
            self._memory = [0] * len(by_id)
            for node, count in free.memory:
                self._memory[by_id[node]] = max(0, count)
            self._pages = {size: [0] * len(by_id) for size in request.huge_pages}
            for node, size, count in free.huge_pages:
                if size in self._pages:
                    self._pages[size][by_id[node]] = max(0, count)

    # CPUs.

    def bin(self, cells: Sequence[Cell]) -> Bin:
        """Count the cells of one L3 group together."""
        if len(cells) == 1:
            return self._count(cells[0])
        counted = [self._count(cell) for cell in cells]
        cores = sorted((core for one in counted for core in one.cores), key=lambda core: -core[1])
        return Bin(sum(one.units for one in counted), tuple(cores), tuple(units for _, units in cores))

    def count(self, part: NodePart) -> PartCount:
        """Count a part of a NUMA node."""
        available = self.cpus & part.cpus
        key = (part.cpus, available, self._unit)
        known = self._parts.get(key)
        if known is None:
            bins = tuple(self._count(cell) for cell in part.cells)
            widths = sorted((width for one in bins for width in one.widths), reverse=True)
            known = self._parts[key] = PartCount(
                sum(one.units for one in bins),
                bins,
                tuple(sorted(one.widths for one in bins)),
                tuple(accumulate(sorted((one.units for one in bins), reverse=True))),
                tuple(accumulate(widths)),
            )
        return known

    def units(self, part: NodePart) -> int:
        """How many units lie in a part of a NUMA node."""
        if self.smt is Smt.PREFER:
            return (self.cpus & part.cpus).bit_count()
        return self.count(part).units

    def units_in(self, domain: Domain) -> int:
        """How many units lie in a domain."""
        if self.smt is Smt.PREFER:
            return (self.cpus & domain.cpus).bit_count()
        return sum(self.units(part) for part in domain.parts)

    def cell_units(self, cells: Iterable[Cell]) -> int:
        """How many units lie in cells."""
        return sum(self._count(cell).units for cell in cells)

    def units_by_package(self, part: NodePart) -> Mapping[int, int]:
        """How many units of a NUMA node lie in each package, by its index."""
        if part.cpus not in self._by_package:
            units = Counter[int]()
            for cell in part.cells:
                units[cell.package] += self._count(cell).units
            self._by_package[part.cpus] = units
        return self._by_package[part.cpus]

    def uses_of(self, cell: Cell) -> Sequence[int]:
        """How many VMs name each of the CPUs of the pool in a cell."""
        if cell.cpus not in self._cell_uses:
            pool = cpus_of(self.free.pool & cell.cpus)
            self._cell_uses[cell.cpus] = [self.uses.get(cpu, 0) for cpu in pool]
        return self._cell_uses[cell.cpus]

    def _count(self, cell: Cell) -> Bin:
        available = self.cpus & cell.cpus
        key = (cell.cpus, available, self._unit)
        known = self._bins.get(key)
        if known is None:
            known = self._bins[key] = _counted(cell, available, self.smt)
        return known

    # Memory.

    def memory_of(self, node: int) -> int:
        """Free bytes outside huge pages of a NUMA node, by its index; 0 when they do not matter here."""
        return self._memory[node] if self.needs_memory else 0

    def pages_of(self, node: int, size: int) -> int:
        """Free huge pages of a size of a NUMA node, by its index."""
        return self._pages[size][node] if self.needs_memory else 0

    def memory_fits(self, nodes: Sequence[int]) -> bool:
        """Whether NUMA nodes together have the memory and the huge pages."""
        return all(sum(amounts) >= need for amounts, need in self.amounts_of(nodes))

    def amounts_of(self, nodes: Sequence[int]) -> list[tuple[list[int], int]]:
        """What NUMA nodes have of memory and of each size of huge pages, with the need of it."""
        if not self.needs_memory:
            return []
        found = [([self._memory[node] for node in nodes], self.small_memory)]
        for size, count in self.request.huge_pages.items():
            found.append(([self._pages[size][node] for node in nodes], count))
        return found

    def fewest_nodes_for_memory(self, nodes: Sequence[int]) -> int:
        """How many of the NUMA nodes it takes at least; more than there are when all do not suffice."""
        return max((fewest(amounts, need) for amounts, need in self.amounts_of(nodes)), default=1)


def fewest(amounts: Sequence[int], need: int) -> int:
    """How many of the amounts cover a need, the largest first; more than there are when all do not."""
    total = 0
    for count, amount in enumerate(sorted(amounts, reverse=True), start=1):
        total += amount
        if total >= need:
            return count
    return len(amounts) + 1


def _counted(cell: Cell, available: int, smt: Smt) -> Bin:
    if smt is Smt.PREFER:
        cores = [
            (core & available, (core & available).bit_count()) for core in cell.cores if core & available
        ]
    else:
        cores = [
            (core, 1 if smt is Smt.ISOLATE else core.bit_count())
            for core in cell.whole_cores
            if not core & ~available
        ]
    cores.sort(key=lambda core: -core[1])
    widths = tuple(units for _, units in cores)
    return Bin(sum(widths), tuple(cores), widths)
