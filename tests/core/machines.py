"""Random machines, what is free on them, and requests to them, for property tests.

Machines are built from the top down, so their levels nest, then disturbed as real ones are: CPU numbers in
any order, cores of unequal width (hybrid, off-line siblings), L3 caches over several NUMA nodes, nodes
without memory or without CPUs.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.request import EmulatorThreads, NumaMemory, Policy, Request, Scope, Smt
from kvplace.core.topology import NumaNode, Package, Topology

GIB = 1 << 30
MIB = 1 << 20
OFFERED_SCOPES = (Scope.ONE_SOCKET, Scope.ONE_NUMA, Scope.ONE_L3, Scope.ANY)
PINNING = (Policy.EXCLUSIVE, Policy.SHARE, Policy.IMMOVABLE)


@st.composite
def topologies(draw: st.DrawFn, *, most_cpus: int = 32, memory: bool | None = None) -> Topology:
    """Any machine of at most so many CPUs; `memory` says whether it knows its memory, None leaves it open."""
    widths = [
        draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 8)))  # one L3 group each
    ]
    while sum(map(sum, widths)) > most_cpus:
        widths[-1].pop()
        widths = [group for group in widths if group]
    total = sum(map(sum, widths))
    ids = iter(draw(st.permutations(range(total))))
    groups = [[mask_of(next(ids) for _ in range(width)) for width in group] for group in widths]
    l3_groups = [mask_of(cpu for core in group for cpu in cpus_of(core)) for group in groups]
    nodes = _grouped(l3_groups, draw(st.integers(1, len(l3_groups))))
    packages = _grouped(nodes, draw(st.integers(1, len(nodes))))
    if draw(st.booleans()) and len(packages) < len(nodes):
        l3_groups = list(packages)  # sub-NUMA clusters: one cache above several nodes
    with_memory = draw(st.booleans()) if memory is None else memory
    records = [
        _numa_node(draw, number, cpus, len(nodes), with_memory=with_memory)
        for number, cpus in enumerate(nodes)
    ]
    if with_memory and draw(st.integers(0, 4)) == 0:
        records.append(NumaNode(len(nodes), 0, memory=8 * GIB))
    return Topology(
        packages=tuple(Package(number, cpus) for number, cpus in enumerate(packages)),
        numa_nodes=tuple(records),
        l3_groups=tuple(l3_groups),
        cores=tuple(core for group in groups for core in group),
        reserved=draw(cpu_subsets(mask_of(range(total)))) if draw(st.booleans()) else 0,
    )


def cpu_subsets(cpus: int) -> st.SearchStrategy[int]:
    """Any part of a set of CPUs."""
    return st.integers(0, cpus).map(lambda mask: mask & cpus)


@st.composite
def frees(draw: st.DrawFn, topology: Topology) -> Free:
    """What may be left on a machine: holes in the CPUs, some of them named by sharing VMs, less memory."""
    empty = free_of(topology, Ledger())
    pool = draw(cpu_subsets(empty.pool)) if draw(st.booleans()) else empty.pool
    named = draw(cpu_subsets(pool)) if draw(st.booleans()) else 0
    return replace(
        empty,
        cpus=pool & ~named,
        pool=pool,
        uses=tuple((cpu, draw(st.integers(1, 3))) for cpu in cpus_of(named)),
        memory=tuple((node, draw(st.integers(-GIB, count))) for node, count in empty.memory),
        huge_pages=tuple((node, size, draw(st.integers(0, count))) for node, size, count in empty.huge_pages),
    )


@st.composite
def requests(draw: st.DrawFn, *, most_vcpus: int = 12) -> Request:
    """Any request that this version offers."""
    paged = draw(st.booleans())
    pages = draw(st.integers(1, 6)) if paged else 0
    return Request(
        vcpus=draw(st.integers(1, most_vcpus)),
        scope=draw(st.sampled_from(OFFERED_SCOPES)),
        policy=draw(st.sampled_from(PINNING)),
        smt=draw(st.sampled_from(Smt)),
        emulator_threads=draw(st.sampled_from(EmulatorThreads)),
        numa_memory=draw(st.sampled_from(NumaMemory)),
        memory=pages * GIB + draw(st.sampled_from([0, GIB, 3 * GIB, 12 * GIB])),
        huge_pages={GIB: pages} if paged else {},
    )


def _grouped(sets: list[int], count: int) -> list[int]:
    """Put sets together, in their order, into so many."""
    size, rest = divmod(len(sets), count)
    grouped, start = [], 0
    for number in range(count):
        end = start + size + (number < rest)
        grouped.append(mask_of(cpu for cpus in sets[start:end] for cpu in cpus_of(cpus)))
        start = end
    return grouped


def _numa_node(draw: st.DrawFn, number: int, cpus: int, count: int, *, with_memory: bool) -> NumaNode:
    if not with_memory:
        return NumaNode(number, cpus, memory=0)
    pages = draw(st.integers(0, 6))
    return NumaNode(
        number,
        cpus,
        memory=draw(st.sampled_from([0, 8, 16])) * GIB + pages * GIB,
        huge_pages={GIB: pages},
        distances={
            other: 10 if other == number else draw(st.sampled_from([11, 12, 21, 32]))
            for other in range(count)
        },
    )
