"""Machines, free sets and requests from one number, mostly ones that are hard to place.

Hypothesis shrinks well but likes small and simple values; here most machines have many nodes that are
partly taken, and most requests are about as large as what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import Free
from kvplace.core.request import EmulatorThreads, NumaMemory, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes, CpuMask
from kvplace.core.topology import Topology
from tests.core.machines import (
    GIB,
    OFFERED_SCOPES,
    SPREAD_SCOPES,
    make_numa_node,
    make_package,
    make_topology,
)

WIDTHS = ((1,), (2,), (2,), (4,), (1, 2), (1, 2), (1, 2, 3, 4))
"""Threads of the cores of one machine: all alike, hybrid or with siblings off line."""


def random_case(seed: int, most_cpus: int) -> tuple[Topology, Free, Request]:
    """One question to the allocator; equal numbers give equal questions."""
    chance = Random(seed)
    machine = random_machine(chance, most_cpus)
    free = random_free(chance, machine)
    return machine, free, random_request(chance, machine, free)


def scarce_memory_case(seed: int, most_cpus: int) -> tuple[Topology, Free, Request]:
    """A question in which memory decides: little on each of several nodes, and a small VM that wants much."""
    chance = Random(seed)
    machine = random_machine(chance, most_cpus)
    while len(machine.numa_nodes) < 3:
        machine = random_machine(chance, most_cpus)
    free = random_free(chance, machine)
    free = replace(free, memory=tuple((n.id, chance.choice((0, 1, 2, 4)) * GIB) for n in machine.numa_nodes))
    total = sum(count for _, count in free.memory) // GIB
    pages = sum(count for _, _, count in free.huge_pages)
    paged = chance.randint(1, pages) if pages and chance.random() < 0.4 else 0
    request = random_request(chance, machine, free)
    spread = SPREAD_SCOPES if request.options.policy is not Policy.NUMA else ()
    return (
        machine,
        free,
        replace(
            request,
            options=replace(
                request.options,
                scope=chance.choice((Scope.ANY, Scope.ONE_SOCKET, *spread)),
                numa_memory=NumaMemory.PREFERRED,
            ),
            vcpus=chance.randint(1, 8),
            memory=(chance.randint(1, max(1, total)) + paged) * GIB,
            huge_pages={GIB: paged} if paged else {},
        ),
    )


def crossed_case(seed: int, most_cpus: int) -> tuple[Topology, Free, Request]:
    """A question to a machine whose packages, NUMA nodes and L3 groups all cross; often for equal shares."""
    chance = Random(seed)
    machine = random_machine(chance, most_cpus)
    pieces = list(machine.cores) if chance.random() < 0.75 else [1 << cpu for cpu in cpus_of(machine.cpus)]
    packages = dealt(chance, pieces, min(len(pieces), len(machine.packages)))
    nodes = dealt(chance, pieces, min(len(pieces), len(machine.numa_nodes)))
    l3_groups = dealt(chance, pieces, chance.randint(1, len(pieces)))
    machine = replace(
        machine,
        packages=tuple(map(make_package, range(len(packages)), packages)),
        numa_nodes=tuple(
            replace(node, cpus=CpuMask(cpus)) for node, cpus in zip(machine.numa_nodes, nodes, strict=True)
        ),
        l3_groups=tuple(map(CpuMask, l3_groups)),
    )
    free = random_free(chance, machine)
    request = random_request(chance, machine, free)
    if request.options.policy is not Policy.NUMA and chance.random() < 0.6:
        request = replace(request, options=replace(request.options, scope=chance.choice(SPREAD_SCOPES)))
    return machine, free, request


def random_machine(chance: Random, most_cpus: int) -> Topology:
    """A machine of up to so many CPUs; two in three have levels that nest as they should."""
    widths = chance.choice(WIDTHS)
    total, cores = 0, []
    while (width := chance.choice(widths)) + total <= most_cpus:
        cores.append(width)
        total += width
        if total > 4 and chance.random() < 0.03:
            break
    ids = iter(chance.sample(range(total), total) if chance.random() < 0.7 else range(total))
    masks = [mask_of(next(ids) for _ in range(width)) for width in cores]
    chance.shuffle(masks)
    l3_groups = dealt(chance, masks, chance.randint(1, len(masks)))
    nodes = dealt(chance, l3_groups, chance.randint(1, min(10, len(l3_groups))))
    packages = dealt(chance, nodes, chance.randint(1, min(4, len(nodes))))
    twist = chance.random()
    if twist < 0.1:
        l3_groups = list(packages)
    elif twist < 0.35:
        pieces = masks if chance.random() < 0.7 else [1 << cpu for cpu in range(total)]
        level = chance.randrange(3)
        if level == 0:
            packages = dealt(chance, pieces, len(packages))
        elif level == 1:
            nodes = dealt(chance, pieces, len(nodes))
        else:
            l3_groups = dealt(chance, pieces, len(l3_groups))
    with_memory = chance.random() < 0.5
    numbers = sorted(chance.sample(range(3 * len(nodes)), len(nodes)))
    table = chance.choice(((21,), (11, 12, 21, 32), (12, 21)))
    records = [
        make_numa_node(
            number,
            cpus,
            memory=chance.choice((0, 4, 8)) * GIB if with_memory else 0,
            huge_pages={},
            distances={
                other: 10 if other == number else chance.choice(table)
                for other in numbers
                if other == number or chance.random() < 0.95
            },
        )
        for number, cpus in zip(numbers, nodes, strict=True)
    ]
    return make_topology(
        packages=tuple(make_package(number, cpus) for number, cpus in enumerate(packages)),
        numa_nodes=tuple(records),
        l3_groups=tuple(l3_groups),
        cores=tuple(masks),
        reserved=mask_of(chance.sample(range(total), chance.choice((0, 0, 0, 1)))),
    )


def dealt(chance: Random, pieces: Sequence[int], count: int) -> list[int]:
    """Deal sets of CPUs out to so many larger ones; each gets at least one."""
    order = chance.sample(pieces, len(pieces))
    sets = order[:count]
    for piece in order[count:]:
        sets[chance.randrange(len(sets))] |= piece
    return sets


def random_free(chance: Random, machine: Topology) -> Free:
    """The resources left when many CPUs are taken, or few; whole cores more often than single threads."""
    pieces = list(machine.cores) if chance.random() < 0.5 else [1 << cpu for cpu in cpus_of(machine.cpus)]
    share = chance.choice((0.3, 0.6, 0.8, 1.0))
    pool = mask_of(cpu for piece in pieces if chance.random() < share for cpu in cpus_of(CpuMask(piece)))
    pool &= machine.allocatable
    named = mask_of(cpu for cpu in cpus_of(pool) if chance.random() < chance.choice((0.0, 0.0, 0.2)))
    knows = any(node.memory for node in machine.numa_nodes)
    return Free(
        cpus=pool & ~named,
        pool=pool,
        uses=tuple((cpu, chance.randint(1, 2)) for cpu in cpus_of(named)),
        memory=tuple((node.id, Bytes(chance.randint(-1, node.memory))) for node in machine.numa_nodes)
        if knows
        else (),
        huge_pages=tuple((node.id, GIB, chance.randint(0, 3)) for node in machine.numa_nodes)
        if knows and chance.random() < 0.5
        else (),
    )


def random_request(chance: Random, machine: Topology, free: Free) -> Request:
    """A request that may just fit; whole cores of its own only where a VM can have them."""
    policy = chance.choice((Policy.EXCLUSIVE,) * 5 + (Policy.SHARE, Policy.IMMOVABLE, Policy.NUMA))
    scopes = tuple(Scope) if policy is not Policy.NUMA else OFFERED_SCOPES
    smts = {Policy.EXCLUSIVE: tuple(Smt), Policy.NUMA: (Smt.PREFER,)}.get(policy, (Smt.PREFER, Smt.REQUIRE))
    left = (free.cpus if policy is Policy.EXCLUSIVE else free.pool).bit_count()
    pages = chance.randint(1, 5) if free.huge_pages and chance.random() < 0.6 else 0
    return Request(
        vcpus=chance.randint(1, max(1, left)) if chance.random() < 0.8 else chance.randint(1, 4),
        options=PinningOptions(
            scope=chance.choice((*scopes, Scope.ANY, Scope.ANY, Scope.ANY)),
            policy=policy,
            smt=chance.choice((*smts, Smt.PREFER)),
            emulator_threads=chance.choice((EmulatorThreads.SHARED,) * 3 + tuple(EmulatorThreads)),
            numa_memory=chance.choice((*NumaMemory, NumaMemory.PREFERRED)),
        ),
        memory=pages * GIB
        + (chance.choice((1, 4, 9, 16)) * GIB if free.memory and chance.random() < 0.7 else 0),
        huge_pages={GIB: pages} if pages else {},
        io_threads=(pages + left) % 5,
    )
