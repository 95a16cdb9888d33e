"""Random machines, what is free on them, and requests to them, for property tests.

Machines are built from the top down, so their levels nest, then disturbed as real ones are: CPU numbers in
any order, cores of unequal width (hybrid, off-line siblings), L3 caches over several NUMA nodes, nodes
without memory or without CPUs, distances that are asymmetric or not all known. `tangled` ones go further:
any level may lie across any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import MappingProxyType

from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.request import EmulatorThreads, NumaMemory, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask, NodeName, NumaId, PackageId
from kvplace.core.topology import NumaNode, Package, Topology

GIB = Bytes(1 << 30)
OFFERED_SCOPES = (Scope.ONE_SOCKET, Scope.ONE_NUMA, Scope.ONE_L3, Scope.ANY)
SPREAD_SCOPES = (Scope.SPREAD_SOCKETS, Scope.SPREAD_NUMA)
PINNING = (Policy.EXCLUSIVE, Policy.SHARE, Policy.IMMOVABLE)


def make_topology(
    packages: Iterable[Package],
    numa_nodes: Iterable[NumaNode],
    l3_groups: Iterable[int],
    cores: Iterable[int],
    reserved: int = 0,
    isolated: int = 0,
) -> Topology:
    """Make a machine of plain numbers."""
    return Topology(
        tuple(packages),
        tuple(numa_nodes),
        tuple(map(CpuMask, l3_groups)),
        tuple(map(CpuMask, cores)),
        CpuMask(reserved),
        CpuMask(isolated),
    )


def make_node(
    topology: Topology, running: Iterable[Occupant] = (), *, pools_shrink: bool = False
) -> ClusterNode:
    """Make a node of a machine and its running VMs."""
    return ClusterNode(NodeName("node"), topology, tuple(running), pools_shrink)


def make_package(number: int, cpus: int) -> Package:
    """Make a package of plain numbers."""
    return Package(PackageId(number), CpuMask(cpus))


def make_numa_node(
    number: int,
    cpus: int,
    memory: int = 0,
    huge_pages: Mapping[Bytes, int] = MappingProxyType({}),
    distances: Mapping[int, int] = MappingProxyType({}),
) -> NumaNode:
    """Make a NUMA node of plain numbers."""
    return NumaNode(
        NumaId(number),
        CpuMask(cpus),
        Bytes(memory),
        huge_pages,
        {NumaId(other): distance for other, distance in distances.items()},
    )


@st.composite
def topologies(
    draw: st.DrawFn, *, most_cpus: int = 32, memory: bool | None = None, tangled: bool | None = False
) -> Topology:
    """Any machine of at most so many CPUs.

    `memory` states whether it knows its memory, `tangled` whether its levels may lie across each other;
    None leaves it open.
    """
    threads = draw(st.integers(1, 4))
    groups_of_widths = draw(
        st.lists(
            st.lists(st.integers(1, 4) | st.just(threads), min_size=1, max_size=6), min_size=1, max_size=8
        )
    )
    while sum(map(sum, groups_of_widths)) > most_cpus:
        groups_of_widths[-1].pop()
        groups_of_widths = [group for group in groups_of_widths if group]
    chance = _chance(draw)
    total = sum(map(sum, groups_of_widths))
    ids = iter(chance.sample(range(total), total))
    groups = [[mask_of(next(ids) for _ in range(width)) for width in group] for group in groups_of_widths]
    l3_groups = [mask_of(cpu for core in group for cpu in cpus_of(core)) for group in groups]
    nodes = _grouped(l3_groups, draw(st.integers(1, len(l3_groups))))
    packages = _grouped(nodes, draw(st.integers(1, len(nodes))))
    if draw(st.booleans()) and len(packages) < len(nodes):
        l3_groups = list(packages)  # sub-NUMA clusters: one cache above several nodes
    cores = [core for group in groups for core in group]
    if tangled or (tangled is None and draw(st.integers(0, 3)) == 0):
        packages = _disturbed(chance, packages, cores)
        nodes = _disturbed(chance, nodes, cores)
        l3_groups = _disturbed(chance, l3_groups, cores)
    with_memory = draw(st.booleans()) if memory is None else memory
    records = [
        _numa_node(chance, number, cpus, len(nodes))
        if with_memory
        else make_numa_node(number, cpus, memory=0)
        for number, cpus in enumerate(nodes)
    ]
    if with_memory and draw(st.integers(0, 4)) == 0:
        records.append(make_numa_node(len(nodes), 0, memory=8 * GIB))
    return make_topology(
        packages=tuple(make_package(number, cpus) for number, cpus in enumerate(packages)),
        numa_nodes=tuple(records),
        l3_groups=tuple(l3_groups),
        cores=tuple(cores),
        reserved=mask_of(chance.sample(range(total), min(total, draw(st.integers(0, 2))))),
    )


@st.composite
def frees(draw: st.DrawFn, topology: Topology) -> Free:
    """The free part of a machine: gaps in the CPUs, some of them named by sharing VMs, and less memory."""
    empty = free_of(topology, Ledger())
    chance = _chance(draw)
    pool, named = empty.pool, 0
    memory, pages = empty.memory, empty.huge_pages
    if draw(st.booleans()):
        taken = chance.randrange(len(list(cpus_of(pool))) + 1)
        pool &= ~mask_of(chance.sample(list(cpus_of(pool)), taken))
    if draw(st.integers(0, 2)) == 0:
        named = pool & chance.getrandbits(64) & chance.getrandbits(64)
    if draw(st.integers(0, 2)) == 0:
        memory = tuple((node, Bytes(chance.randint(-GIB, count))) for node, count in memory)
        pages = tuple((node, size, chance.randint(0, count)) for node, size, count in pages)
    return replace(
        empty,
        cpus=pool & ~named,
        pool=pool,
        uses=tuple((cpu, chance.randint(1, 3)) for cpu in cpus_of(CpuMask(named))),
        memory=memory,
        huge_pages=pages,
    )


@st.composite
def requests(
    draw: st.DrawFn,
    *,
    most_vcpus: int = 12,
    scopes: Sequence[Scope] = OFFERED_SCOPES,
    policies: Sequence[Policy] = PINNING,
    smts: Sequence[Smt] = tuple(Smt),
) -> Request:
    """Any request that this version offers; small ones are likelier, since they fit."""
    paged = draw(st.integers(0, 3)) == 0
    pages = draw(st.integers(1, 6)) if paged else 0
    return Request(
        vcpus=draw(st.integers(1, 3) | st.integers(1, most_vcpus)),
        options=PinningOptions(
            scope=draw(st.sampled_from(scopes)),
            policy=draw(st.sampled_from(policies)),
            smt=draw(st.sampled_from(smts)),
            emulator_threads=draw(st.sampled_from(EmulatorThreads)),
            numa_memory=draw(st.sampled_from(NumaMemory)),
        ),
        memory=pages * GIB + draw(st.sampled_from([0, 0, GIB, 3 * GIB, 12 * GIB])),
        huge_pages={GIB: pages} if paged else {},
    )


def subsets(cpus: int) -> st.SearchStrategy[int]:
    """Any part of a set of CPUs."""
    return st.integers(0, cpus).map(lambda mask: mask & cpus)


def _chance(draw: st.DrawFn) -> Random:
    """Details that need no shrinking come from one number: a draw for each would take ten times as long."""
    return Random(draw(st.integers(0, 1 << 32)))


def _grouped(sets: list[CpuMask], count: int) -> list[CpuMask]:
    """Put sets together, in their order, into so many."""
    size, rest = divmod(len(sets), count)
    grouped, start = [], 0
    for number in range(count):
        end = start + size + (number < rest)
        grouped.append(mask_of(cpu for cpus in sets[start:end] for cpu in cpus_of(cpus)))
        start = end
    return grouped


def _disturbed(chance: Random, level: list[CpuMask], cores: list[CpuMask]) -> list[CpuMask]:
    """Leave a level as it is, or deal all cores, now and then all CPUs, out anew to as many sets or fewer."""
    if chance.random() < 0.5:
        return level
    pieces = (
        cores if chance.random() < 0.7 else [CpuMask(1 << cpu) for core in cores for cpu in cpus_of(core)]
    )
    dealt = [NO_CPUS] * len(level)
    for piece in pieces:
        dealt[chance.randrange(len(level))] |= piece
    return [cpus for cpus in dealt if cpus]


def _numa_node(chance: Random, number: int, cpus: int, count: int) -> NumaNode:
    pages = chance.randint(0, 6)
    return make_numa_node(
        number,
        cpus,
        memory=chance.choice([0, 8, 16]) * GIB + pages * GIB,
        huge_pages={GIB: pages},
        distances={
            other: 10 if other == number else chance.choice([11, 12, 21, 32])
            for other in range(count)
            if other == number or chance.random() < 0.9
        },
    )
