"""Whether a VM fits at all, answered by counting: a NUMA set that serves it, or how much is missing.

A VM fits in a domain that has the CPUs, in equal shares of some of its sockets or NUMA nodes where the scope
spreads, and the memory and huge pages: any NUMA node of the domain may give these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvplace.core.allocator.available_units import AvailableUnits, counted_unit, units_needed
from kvplace.core.allocator.layout import NodePart, ScopeDomain, layout_of
from kvplace.core.allocator.numa_sets import NumaSet, rank_of, serves
from kvplace.core.allocator.objectives import NodeRank
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import Free
from kvplace.core.quantity import plain_bytes
from kvplace.core.request import NumaMemory, Request, Smt
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask
from kvplace.core.search_budget import SearchBudget
from kvplace.core.topology import Topology

_BUILD_STEPS = 20_000
"""NUMA nodes checked while a set that serves is made smaller and nearer."""


def fits(available: AvailableUnits) -> bool:
    """Whether any placement exists."""
    return any(
        _DomainSearch(available, domain).serve(domain.parts) is not None
        for domain in available.layout.domains[available.request.options.scope.within]
    )


def near_set(available: AvailableUnits) -> NumaSet | None:
    """Build a NUMA set that serves the VM: few sockets and nodes, near to each other, if not the best."""
    best: tuple[NodeRank, NumaSet] | None = None
    for domain in available.layout.domains[available.request.options.scope.within]:
        found = _DomainSearch(available, domain).reduced()
        if found is not None and (best is None or rank_of(available, found) < best[0]):
            best = (rank_of(available, found), found)
    return best[1] if best is not None else None


class _DomainSearch:
    """One scope domain, asked for NUMA sets among some of its parts."""

    def __init__(self, available: AvailableUnits, domain: ScopeDomain) -> None:
        self._available = available
        self._domain = domain
        self._budget = SearchBudget(_BUILD_STEPS)
        self._beside = available.device_choices[-1].beside

    def serve(self, parts: Sequence[NodePart]) -> NumaSet | None:
        """Make a NUMA set of these parts, if it serves the VM."""
        available = self._available
        self._budget.spend(len(parts))
        if sum([available.units(part) for part in parts]) < available.need:
            return None
        if not available.memory_fits({part.node for part in parts}):
            return None
        ordered = tuple(sorted(parts, key=lambda part: (part.node, part.socket)))
        numa_set = NumaSet(ordered, self._domain, beside=self._beside)
        return numa_set if serves(available, numa_set) else None

    def reduced(self) -> NumaSet | None:
        """A set that serves the VM only with all of its sockets and NUMA nodes."""
        available, domain = self._available, self._domain
        best = self._without_spare(domain.parts)
        if best is None or len(best.parts) == 1:
            return best
        rank = rank_of(available, best)
        distances = available.layout.distances
        for seed in sorted(domain.parts, key=lambda part: -available.units(part)):
            if self._budget.is_spent:
                break
            row = distances[seed.node]
            ordered = sorted(domain.parts, key=lambda part: (part is not seed, row[part.node]))
            low, high = 0, len(ordered)
            while high - low > 1:
                middle = (low + high) // 2
                if self.serve(ordered[:middle]) is not None:
                    high = middle
                else:
                    low = middle
            found = self._without_spare(ordered[:high])
            if found is not None and (other := rank_of(available, found)) < rank:
                best, rank = found, other
        return best

    def _without_spare(self, parts: Sequence[NodePart]) -> NumaSet | None:
        best = self.serve(parts)
        if best is None:
            return None
        units: Counter[int] = Counter()
        for part in best.parts:
            units[part.socket] += self._available.units(part)
        fullest_last = sorted(units, key=lambda socket: units[socket])
        for spare in (
            *[[part for part in best.parts if part.socket == socket] for socket in fullest_last],
            *[[part] for part in reversed(best.parts)],
        ):
            if self._budget.is_spent:
                break
            best = self.serve([part for part in best.parts if part not in spare]) or best
        return best


class MissingAmount(NamedTuple):
    """The least missing resource, and how much: units of CPUs, huge pages, or bytes outside these."""

    what: Literal["cpus", "pages", "memory"]
    amount: int


class ShortageCount:
    """The shortage of a request on one machine, also on an empty one."""

    def __init__(self, topology: Topology, request: Request) -> None:
        self._domains = [
            (domain.cpus, [topology.numa_nodes[part.node].id for part in domain.parts])
            for domain in layout_of(topology).domains[request.options.scope.within]
        ]
        self._need = units_needed(request)
        self._owns = request.owns_cpus
        self._unit = counted_unit(request)
        self._cores = _core_shapes(topology)
        self._pages = sorted(request.huge_pages.items())
        counts_memory = request.options.numa_memory is not NumaMemory.OFF
        self._memory = plain_bytes(request.memory, request.huge_pages) if counts_memory else 0

    def missing(self, free: Free) -> MissingAmount | None:
        """Return what `place` refuses for, in a few microseconds.

        None where counting is not enough: the VM may fit, or equal shares of something are missing.
        """
        units, need = self._units(free), self._need
        best = max([(units & mask).bit_count() for mask, _ in self._domains])
        if best < need:
            return MissingAmount("cpus", need - best)
        if not self._pages and not (self._memory and free.memory):
            return None
        able = [nodes for mask, nodes in self._domains if (units & mask).bit_count() >= need]
        for size, count in self._pages:
            pages_of = {node: max(0, pages) for node, of, pages in free.huge_pages if of == size}
            pages = [sum([pages_of.get(node, 0) for node in nodes]) for nodes in able]
            if (most := max(pages)) < count:
                return MissingAmount("pages", count - most)
            able = [nodes for nodes, here in zip(able, pages, strict=True) if here >= count]
        if self._memory and free.memory:
            bytes_of = {node: max(0, count) for node, count in free.memory}
            most = max([sum([bytes_of.get(node, 0) for node in nodes]) for nodes in able])
            if most < self._memory:
                return MissingAmount("memory", self._memory - most)
        return None

    def _units(self, free: Free) -> CpuMask:
        """Return one CPU for each unit: of a whole free core one or all, as the request has it."""
        cpus = free.cpus if self._owns else free.pool
        if self._unit is Smt.PREFER:
            return cpus
        units = NO_CPUS
        for first_threads, threads in self._cores:
            whole = first_threads
            for thread in threads:
                whole = CpuMask(whole & cpus >> thread)
            for thread in threads[:1] if self._unit is Smt.ISOLATE else threads:
                units = CpuMask(units | whole << thread)
        return units


def _core_shapes(topology: Topology) -> list[tuple[CpuMask, list[CpuId]]]:
    """Return the first threads of cores that may be given out whole, and where all lie from these.

    Cores with equally placed threads are together: mostly there is one such entry.
    """
    shapes: dict[int, int] = {}
    for core in topology.undivided_cores:
        first = core & -core
        shape = core // first
        shapes[shape] = shapes.get(shape, 0) | first
    return [(CpuMask(firsts), list(cpus_of(CpuMask(shape)))) for shape, firsts in shapes.items()]
