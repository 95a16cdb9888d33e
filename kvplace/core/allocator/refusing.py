"""Why nothing on a machine serves a request: the first constraint that fails, with its shortfall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvplace.core.allocator.layout import ScopeDomain, Segment
from kvplace.core.allocator.supply import Supply
from kvplace.core.quantity import about_bytes, counted, format_bytes
from kvplace.core.refusal import Reason, Refusal
from kvplace.core.request import Request, Scope, Smt
from kvplace.core.scalars import Bytes

_SCOPES = {
    Scope.ONE_SOCKET: (Reason.NO_SOCKET_FITS, "socket"),
    Scope.ONE_NUMA: (Reason.NO_NUMA_NODE_FITS, "NUMA node"),
    Scope.ONE_L3: (Reason.NO_L3_FITS, "L3 group"),
    Scope.SPREAD_SOCKETS: (Reason.NO_SOCKET_FITS, "machine"),
    Scope.SPREAD_NUMA: (Reason.NO_NUMA_NODE_FITS, "machine"),
    Scope.ANY: (Reason.NO_NODE_FITS, "machine"),
}


_MOST_SMALLER = 32
"""Smaller VMs that are tried one by one for the largest that fits, which only the message needs."""


def refuse(supply: Supply, *, never: bool, fits: Callable[[Request], bool | None]) -> Refusal:
    """Explain why no part of the machine serves a request.

    CPUs come before huge pages, huge pages before memory, and an even spread comes last. The numbers are
    those of the place where least is missing. `fits` says whether the machine could serve another request.
    """
    request = supply.request
    reason, noun = _SCOPES[request.options.scope]
    domains = supply.layout.domains[request.options.scope]
    kind = unit_name(request, supply.need)
    best, where = _most([(supply.units_in(domain), domain.name) for domain in domains])
    if best < supply.need:
        if request.options.scope in (Scope.SPREAD_SOCKETS, Scope.SPREAD_NUMA):
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


def _shared_there(supply: Supply, domains: Sequence[ScopeDomain], where: str) -> str:
    """Count the CPUs there without an owner that VMs with shared CPUs use."""
    if not supply.request.owns_cpus:
        return ""
    named = supply.free.pool & ~supply.free.cpus
    count = next((named & domain.cpus).bit_count() for domain in domains if domain.name == where)
    if not count:
        return ""
    return f" ({count} more {'is' if count == 1 else 'are'} named by VMs that share CPUs)"


def _uneven(supply: Supply, reason: Reason, fits: Callable[[Request], bool | None], never: bool) -> Refusal:
    """There is enough of everything, but not in equal shares."""
    noun = "sockets" if supply.request.options.scope is Scope.SPREAD_SOCKETS else "NUMA nodes"
    needed = supply.request.vcpus
    most = min(needed - 1, _most_in_equal_shares(supply) - (supply.need - needed))
    best = _largest(
        most, _surely_alike(supply), lambda count: fits(replace(supply.request, vcpus=count)) is True
    )
    also = " that have the memory too" if supply.needs_memory else ""
    message = f"no equal shares of {counted(needed, 'vCPU')} over {noun}{also}, best {best}"
    if fits(supply.request) is None:
        message += " (not proved: the search for them reached its bound)"
    return Refusal(reason, message, _shortfall(needed, best, noun), never)


def _largest(most: int, alike: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, up to `most`; from `alike` on, smaller ones fit where larger ones do."""
    low, high = min(alike, most + 1) - 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    if low >= alike:
        return low
    return next((count for count in range(low, max(0, low - _MOST_SMALLER), -1) if fits(count)), 0)


def _surely_alike(supply: Supply) -> int:
    """A number of vCPUs from which on a smaller VM can be spread wherever a larger one can.

    Where each share has a CPU for every NUMA node that it may have to touch, taking one away leaves enough.
    Where levels cross nothing is sure.
    """
    (domain,) = supply.layout.domains[supply.request.options.scope]
    if domain.crossed:
        return supply.request.vcpus
    if supply.request.options.scope is Scope.SPREAD_NUMA:
        return len(domain.parts) + 1
    nodes = Counter(part.packages for part in domain.parts)
    return len(nodes) * max(nodes.values()) + 1


def _most_in_equal_shares(supply: Supply) -> int:
    """A number of units beyond which no VM can be spread, however memory lies on the nodes it must have."""
    (domain,) = supply.layout.domains[supply.request.options.scope]
    parts = [part for part in domain.parts if supply.units(part)]
    fewest = 1
    if supply.request.options.scope is Scope.SPREAD_NUMA:
        units = [supply.units(part) for part in parts]
        fewest = supply.fewest_nodes_for_memory([part.node for part in parts])
    else:
        by_package: dict[int, list[Segment]] = {}
        for part in parts:
            for segment in part.segments:
                by_package.setdefault(segment.package, []).append(segment)
        units = [supply.segment_units(segments) for segments in by_package.values()]
    units.sort(reverse=True)
    spread = [
        count * units[count - 1] + sum(1 for amount in units[:count] if amount > units[count - 1])
        for count in range(fewest, len(units) + 1)
    ]
    # A VM with fewer units than NUMA nodes uses some of them for their memory alone.
    return max([len(parts), *spread])


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
    """What is counted for a request, in the singular or plural that the need asks for."""
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
    return sum(supply.memory_of(part.node) for part in domain.parts if supply.units(part))


def _pages_in(supply: Supply, domain: ScopeDomain, size: Bytes) -> int:
    return sum(supply.pages_of(part.node, size) for part in domain.parts if supply.units(part))
