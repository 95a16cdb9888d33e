"""Why nothing on a machine serves a request: the first constraint that fails, with its shortfall."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvplace.core.allocator.device_choices import names_of_nodes
from kvplace.core.allocator.layout import ScopeDomain
from kvplace.core.allocator.supply import Supply
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


def refuse(supply: Supply, *, never: bool, fits: Callable[[Request], bool]) -> Refusal:
    """Explain why no part of the machine serves a request.

    CPUs come before huge pages, huge pages before memory, and an even spread comes last. The numbers are
    those of the place where least is missing. `fits` returns whether the machine could serve another request.
    """
    request = supply.request
    scope = request.options.scope
    reason, noun = _REASONS[scope.level], scope.within.value
    if scope.within is Level.SOCKET and supply.topology.sockets != supply.topology.packages:
        noun = Level.NUMA.value
    domains = supply.layout.domains[scope.within]
    kind = unit_name(request, supply.need)
    best, where = _most([(supply.units_in(domain), domain.name) for domain in domains])
    if best < supply.need:
        if scope.evenly:
            reason = Reason.NO_NODE_FITS
        shared = _shared_there(supply, domains, where)
        message = f"no {noun} with {supply.need} {kind}, best {best} on {where}{shared}"
        return Refusal(reason, message, _shortfall(supply.need, best, where), never)
    able = [domain for domain in domains if supply.units_in(domain) >= supply.need]
    for size, count in sorted(request.huge_pages.items()):
        everywhere = max(_pages_in(supply, domain, size) for domain in domains)
        most, where = _most([(_pages_in(supply, domain, size), domain.name) for domain in able])
        if most < count:
            also = f"{supply.need} {kind} and " if everywhere >= count else ""
            pages = f"{counted(count, 'free huge page')} of {format_bytes(size)}"
            message = f"no {noun} with {also}{pages}, best {most} on {where}"
            return Refusal(Reason.NOT_ENOUGH_HUGE_PAGES, message, _shortfall(count, most, where), never)
        able = [domain for domain in able if _pages_in(supply, domain, size) >= count]
    most, where = _most([(_memory_in(supply, domain), domain.name) for domain in able])
    if most < supply.small_memory:
        needed, here = about_bytes(supply.small_memory), about_bytes(most)
        if here == needed:
            needed, here = f"{supply.small_memory} bytes", f"{most} bytes"
        message = (
            f"no {noun} with {supply.need} {kind} and {needed} of free memory, best {here} on {where}"
            f"{_elsewhere(supply, domains)}"
        )
        return Refusal(Reason.NOT_ENOUGH_MEMORY, message, _shortfall(supply.small_memory, most, where), never)
    return _uneven(supply, reason, fits, never)


def refuse_devices(supply: Supply) -> Refusal:
    """Explain why a VM that would fit elsewhere does not fit beside its devices."""
    if supply.unknown_devices is not None:
        return Refusal(Reason.NO_LOCAL_DEVICES, supply.unknown_devices.message, {}, never=False)
    request = supply.request
    beside = supply.device_choices[0].beside
    nodes = sorted({supply.topology.numa_nodes[index].id for near in beside for index in near})
    parts = [
        part
        for domain in supply.layout.domains[Level.MACHINE]
        for part in domain.parts
        if supply.topology.numa_nodes[part.node].id in nodes
    ]
    best = sum([supply.units(part) for part in parts])
    where, what = names_of_nodes(nodes), _devices_there(supply, nodes)
    kind = unit_name(request, supply.need)
    if len(beside) == 1 and best < supply.need:
        message = f"no {supply.need} {kind} on {where}, {what}; best {best}"
        return Refusal(Reason.NO_LOCAL_DEVICES, message, _shortfall(supply.need, best, where), never=False)
    scope = request.options.scope.value
    message = f"no {supply.need} {kind} with cpu-set {scope} and the memory of the VM on {where}, {what}"
    return Refusal(Reason.NO_LOCAL_DEVICES, message, {"where": where}, never=False)


def _devices_there(supply: Supply, nodes: Sequence[NumaId]) -> str:
    """State how these NUMA nodes are tied to the devices of the VM."""
    request, devices = supply.request, supply.free.devices
    names = " and ".join(sorted(request.devices))
    one = len(nodes) == 1
    if not names or devices is None:
        return f"the NUMA node{'' if one else 's'} of its devices"
    having = {count.node for count in devices.counts if count.resource in request.devices and count.free}
    if having == set(nodes):
        return f"the only {'one' if one else 'ones'} with a free {names}"
    return f"where the kubelet will take {names}"


def _shared_there(supply: Supply, domains: Sequence[ScopeDomain], where: str) -> str:
    """Count the CPUs there without an owner that VMs with shared CPUs use."""
    if not supply.request.owns_cpus:
        return ""
    named = supply.free.pool & ~supply.free.cpus
    count = next((named & domain.cpus).bit_count() for domain in domains if domain.name == where)
    if not count:
        return ""
    return f" ({count} more {'is' if count == 1 else 'are'} named by VMs that share CPUs)"


def _uneven(supply: Supply, reason: Reason, fits: Callable[[Request], bool], never: bool) -> Refusal:
    """There is enough of everything, but not in equal shares."""
    noun = f"{supply.request.options.scope.level.value}s"
    needed = supply.request.vcpus
    smaller = (replace(supply.request, vcpus=count) for count in range(needed - 1, 0, -1))
    best = next((one.vcpus for one in smaller if fits(one)), 0)
    message = f"no equal shares of {counted(needed, 'vCPU')} over {noun}, best {best}"
    return Refusal(reason, message, _shortfall(needed, best, noun), never)


def _elsewhere(supply: Supply, domains: Sequence[ScopeDomain]) -> str:
    """Name the place that has the memory but not the CPUs, if there is one."""
    for domain in domains:
        memory = sum(supply.memory_of(part.node) for part in domain.parts)
        units = supply.units_in(domain)
        if memory >= supply.small_memory and units < supply.need:
            return (
                f" ({domain.name} has {about_bytes(memory)}, but {units} {unit_name(supply.request, units)})"
            )
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


def _memory_in(supply: Supply, domain: ScopeDomain) -> int:
    return sum(supply.memory_of(part.node) for part in domain.parts)


def _pages_in(supply: Supply, domain: ScopeDomain, size: Bytes) -> int:
    return sum(supply.pages_of(part.node, size) for part in domain.parts)
