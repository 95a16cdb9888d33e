"""The shortage of a request on machines of one topology, by counting alone: CPUs, huge pages or memory.

`place` states the same in its refusal, and where and why in words, which takes ten times as long. Where
thousands of nodes refuse, this number is enough to find the refusals to show.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvplace.core.allocator.layout import layout_of
from kvplace.core.allocator.supply import counted_unit, units_needed
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import Free
from kvplace.core.quantity import plain_bytes
from kvplace.core.request import NumaMemory, Request, Smt
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask
from kvplace.core.topology import Topology


class Missing(NamedTuple):
    """The least missing resource, and how much: units of CPUs, huge pages, or bytes outside these."""

    what: Literal["cpus", "pages", "memory"]
    amount: int


class Shortage:
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

    def missing(self, free: Free) -> Missing | None:
        """Return what `place` refuses for, in a few microseconds.

        None where counting is not enough: the VM may fit, or equal shares of something are missing.
        """
        units, need = self._units(free), self._need
        best = max([(units & mask).bit_count() for mask, _ in self._domains])
        if best < need:
            return Missing("cpus", need - best)
        if not self._pages and not (self._memory and free.memory):
            return None
        able = [nodes for mask, nodes in self._domains if (units & mask).bit_count() >= need]
        for size, count in self._pages:
            pages_of = {node: max(0, pages) for node, of, pages in free.huge_pages if of == size}
            pages = [sum([pages_of.get(node, 0) for node in nodes]) for nodes in able]
            if (most := max(pages)) < count:
                return Missing("pages", count - most)
            able = [nodes for nodes, here in zip(able, pages, strict=True) if here >= count]
        if self._memory and free.memory:
            bytes_of = {node: max(0, count) for node, count in free.memory}
            most = max([sum([bytes_of.get(node, 0) for node in nodes]) for nodes in able])
            if most < self._memory:
                return Missing("memory", self._memory - most)
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
