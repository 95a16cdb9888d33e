"""Whether a VM fits at all, by counting: a NUMA set that serves it, or the shortage and the refusal.

A VM fits in a domain that has the CPUs, in equal shares of some of its sockets or NUMA nodes where the scope
spreads, and the memory and huge pages: any NUMA node of the domain may give these. A refusal names the first
constraint that fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from kvplace.core.allocator.available_units import AvailableUnits, counted_unit, units_needed
from kvplace.core.allocator.device_choices import names_of_nodes
from kvplace.core.allocator.layout import NodePart, ScopeDomain, layout_of
from kvplace.core.allocator.numa_sets import NumaSet, rank_of, serves
from kvplace.core.allocator.objectives import NodeRank
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import Free
from kvplace.core.placement import Reason, Refusal
from kvplace.core.quantity import about_bytes, counted, format_bytes, plain_bytes
from kvplace.core.request import Level, NumaMemory, Request, Smt
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NumaId
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
    """Build a NUMA set that serves the VM: few sockets and nodes, near to each other, maybe not the best."""
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
        """Return the shortage that `place` would report, in a few microseconds.

        None where counting is not enough: the VM may fit, or equal shares are missing.
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
        """Return one CPU for each unit: one or all CPUs of a whole free core, by the unit of the request."""
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
    """Return the first threads of cores that may be given out whole, and the offsets of all threads.

    Cores with equal offsets share an entry: mostly there is one.
    """
    shapes: dict[int, int] = {}
    for core in topology.undivided_cores:
        first = core & -core
        shape = core // first
        shapes[shape] = shapes.get(shape, 0) | first
    return [(CpuMask(firsts), list(cpus_of(CpuMask(shape)))) for shape, firsts in shapes.items()]


_REASONS = {
    Level.MACHINE: Reason.NO_NODE_FITS,
    Level.SOCKET: Reason.NO_SOCKET_FITS,
    Level.NUMA: Reason.NO_NUMA_NODE_FITS,
    Level.L3: Reason.NO_L3_FITS,
}


def refuse(available: AvailableUnits, *, never: bool, fits: Callable[[Request], bool]) -> Refusal:
    """Explain why no part of the machine serves a request.

    CPUs come before huge pages, huge pages before memory, and an even spread comes last. The numbers belong
    to the place with the smallest shortage. `fits` returns whether the machine could serve another request.
    """
    request = available.request
    scope = request.options.scope
    reason, noun = _REASONS[scope.level], scope.within.noun
    if scope.within is Level.SOCKET:
        noun = available.topology.socket_noun
    domains = available.layout.domains[scope.within]
    kind = unit_name(request, available.need)
    best, where = _most([(available.units_in(domain), domain.name) for domain in domains])
    if best < available.need:
        if scope.evenly:
            reason = Reason.NO_NODE_FITS
        shared = _shared_there(available, domains, where)
        message = f"no {noun} with {available.need} {kind}, best {best} on {where}{shared}"
        return Refusal(reason, message, _shortfall(available.need, best, where), never)
    able = [domain for domain in domains if available.units_in(domain) >= available.need]
    for size, count in sorted(request.huge_pages.items()):
        everywhere = max(_pages_in(available, domain, size) for domain in domains)
        most, where = _most([(_pages_in(available, domain, size), domain.name) for domain in able])
        if most < count:
            also = f"{available.need} {kind} and " if everywhere >= count else ""
            pages = f"{counted(count, 'free huge page')} of {format_bytes(size)}"
            message = f"no {noun} with {also}{pages}, best {most} on {where}"
            return Refusal(Reason.NOT_ENOUGH_HUGE_PAGES, message, _shortfall(count, most, where), never)
        able = [domain for domain in able if _pages_in(available, domain, size) >= count]
    most, where = _most([(_memory_in(available, domain), domain.name) for domain in able])
    if most < available.small_memory:
        needed, here = about_bytes(available.small_memory), about_bytes(most)
        if here == needed:
            needed, here = f"{available.small_memory} bytes", f"{most} bytes"
        message = (
            f"no {noun} with {available.need} {kind} and {needed} of free memory, best {here} on {where}"
            f"{_elsewhere(available, domains)}"
        )
        return Refusal(
            Reason.NOT_ENOUGH_MEMORY, message, _shortfall(available.small_memory, most, where), never
        )
    return _uneven(available, reason, fits, never)


def refuse_devices(available: AvailableUnits) -> Refusal:
    """Explain why a VM that would fit elsewhere does not fit beside its devices."""
    if available.unknown_devices:
        return Refusal(Reason.NO_LOCAL_DEVICES, available.unknown_devices, {}, never=False)
    request = available.request
    beside = available.device_choices[0].beside
    nodes = sorted({available.topology.numa_nodes[index].id for near in beside for index in near})
    parts = [
        part
        for domain in available.layout.domains[Level.MACHINE]
        for part in domain.parts
        if available.topology.numa_nodes[part.node].id in nodes
    ]
    best = sum([available.units(part) for part in parts])
    where, what = names_of_nodes(nodes), _devices_there(available, nodes)
    kind = unit_name(request, available.need)
    if len(beside) == 1 and best < available.need:
        message = f"no {available.need} {kind} on {where}, {what}; best {best}"
        return Refusal(Reason.NO_LOCAL_DEVICES, message, _shortfall(available.need, best, where), never=False)
    scope = request.options.scope.value
    message = f"no {available.need} {kind} with cpu-set {scope} and the memory of the VM on {where}, {what}"
    return Refusal(Reason.NO_LOCAL_DEVICES, message, {"where": where}, never=False)


def _devices_there(available: AvailableUnits, nodes: Sequence[NumaId]) -> str:
    """State how these NUMA nodes are tied to the devices of the VM."""
    request, devices = available.request, available.free.devices
    names = " and ".join(sorted(request.devices))
    one = len(nodes) == 1
    if not names or devices is None:
        return f"the NUMA node{'' if one else 's'} of its devices"
    having = {count.node for count in devices.counts if count.resource in request.devices and count.free}
    if having == set(nodes):
        return f"the only {'one' if one else 'ones'} with a free {names}"
    return f"where the kubelet will take {names}"


def _shared_there(available: AvailableUnits, domains: Sequence[ScopeDomain], where: str) -> str:
    """Count the CPUs there without an owner that VMs with shared CPUs use."""
    if not available.request.owns_cpus:
        return ""
    named = available.free.pool & ~available.free.cpus
    count = next((named & domain.cpus).bit_count() for domain in domains if domain.name == where)
    if not count:
        return ""
    return f" ({count} more {'is' if count == 1 else 'are'} named by VMs that share CPUs)"


def _uneven(
    available: AvailableUnits, reason: Reason, fits: Callable[[Request], bool], never: bool
) -> Refusal:
    """Explain that there is enough of everything, but not in equal shares."""
    noun = f"{available.request.options.scope.level.noun}s"
    needed = available.request.vcpus
    smaller = (replace(available.request, vcpus=count) for count in range(needed - 1, 0, -1))
    best = next((one.vcpus for one in smaller if fits(one)), 0)
    message = f"no equal shares of {counted(needed, 'vCPU')} over {noun}, best {best}"
    return Refusal(reason, message, _shortfall(needed, best, noun), never)


def _elsewhere(available: AvailableUnits, domains: Sequence[ScopeDomain]) -> str:
    """Name the place that has the memory but not the CPUs, if there is one."""
    for domain in domains:
        memory = sum(available.memory_of(part.node) for part in domain.parts)
        units = available.units_in(domain)
        if memory >= available.small_memory and units < available.need:
            counted_units = f"{units} {unit_name(available.request, units)}"
            return f" ({domain.name} has {about_bytes(memory)}, but {counted_units})"
    return ""


def _shortfall(needed: int, best: int, where: str) -> dict[str, int | str]:
    return {"needed": needed, "best": best, "missing": needed - best, "where": where}


def _most(amounts: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """The largest amount and where it is; the first of equal ones."""
    return max(amounts, key=lambda pair: pair[0])


def unit_name(request: Request, need: int) -> str:
    """The unit of a request, in the singular or plural that the number needs."""
    one = need == 1
    if not request.owns_cpus:
        return "CPU of the shared pool" if one else "CPUs of the shared pool"
    match request.options.smt:
        case Smt.ISOLATE:
            return "whole free core" if one else "whole free cores"
        case Smt.REQUIRE:
            return "free CPU on whole cores" if one else "free CPUs on whole cores"
        case Smt.PREFER:
            return "free CPU" if one else "free CPUs"


def _memory_in(available: AvailableUnits, domain: ScopeDomain) -> int:
    return sum(available.memory_of(part.node) for part in domain.parts)


def _pages_in(available: AvailableUnits, domain: ScopeDomain, size: Bytes) -> int:
    return sum(available.pages_of(part.node, size) for part in domain.parts)
