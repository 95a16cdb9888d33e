"""Why nothing on a machine serves a request: the first constraint that fails, with its shortfall."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvplace.core.allocator.available_units import AvailableUnits
from kvplace.core.allocator.device_choices import names_of_nodes
from kvplace.core.allocator.layout import ScopeDomain
from kvplace.core.placement import Reason, Refusal
from kvplace.core.quantity import about_bytes, counted, format_bytes
from kvplace.core.request import Level, Request, Smt
from kvplace.core.scalars import Bytes, NumaId

_REASONS = {
    Level.MACHINE: Reason.NO_NODE_FITS,
    Level.SOCKET: Reason.NO_SOCKET_FITS,
    Level.NUMA: Reason.NO_NUMA_NODE_FITS,
    Level.L3: Reason.NO_L3_FITS,
}


def refuse(available: AvailableUnits, *, never: bool, fits: Callable[[Request], bool]) -> Refusal:
    """Explain why no part of the machine serves a request.

    CPUs come before huge pages, huge pages before memory, and an even spread comes last. The numbers are
    those of the place where least is missing. `fits` returns whether the machine could serve another request.
    """
    request = available.request
    scope = request.options.scope
    reason, noun = _REASONS[scope.level], scope.within.value
    if scope.within is Level.SOCKET and available.topology.sockets != available.topology.packages:
        noun = Level.NUMA.value
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
    if available.unknown_devices is not None:
        return Refusal(Reason.NO_LOCAL_DEVICES, available.unknown_devices.message, {}, never=False)
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
    """There is enough of everything, but not in equal shares."""
    noun = f"{available.request.options.scope.level.value}s"
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
