"""Machines of real size: no answer is worse than what tables filled CPU by CPU prove possible.

A search through all sets of CPUs ends at 16 of them. Where levels nest and memory does not matter, the best
key of a large machine follows from tables instead: how few cores give so many CPUs of an L3 group, then of
a NUMA node, then of every set of NUMA nodes. The tables compare everything, so they are exact too; that they
agree with the search on small machines is a test of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from random import Random

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_CPUS, CpuMask, NumaId
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import WORST, Key, best_key, units
from tests.core.allocator.validity import key_of_valid, whole_cores
from tests.core.machines import GIB, make_numa_node, make_package, make_topology
from tests.profiles import rounds

Table = dict[int, tuple[int, int]]
"""L3 groups and cores that it takes at least, by the units that they give."""
MACHINES = ((2, 4, 2, 4), (4, 2, 2, 3), (8, 1, 3, 4), (1, 8, 2, 4), (2, 1, 12, 4), (1, 9, 1, 6))
"""Packages, NUMA nodes in each, L3 groups in each, cores in each."""


@pytest.mark.parametrize("shape", MACHINES)
def test_a_fragmented_machine_of_real_size_is_used_as_well_as_the_tables_prove_possible(
    shape: tuple[int, int, int, int],
) -> None:
    chance = Random(str(shape))
    for number in range(rounds(30, quick=8)):
        machine, free, request = nested_case(chance, shape)
        answer = place(machine, free, request)
        found = key_of_valid(machine, free, request, answer) if isinstance(answer, Placement) else None
        assert found == best_by_tables(machine, free, request), f"case {number} of {shape}"


def test_the_tables_agree_with_the_search_of_all_sets_of_cpus_on_small_machines() -> None:
    chance = Random(1)
    for _ in range(rounds(200, quick=40)):
        shape = chance.choice(((2, 2, 2, 1), (1, 3, 2, 1), (3, 1, 1, 2), (1, 1, 3, 2)))
        case = nested_case(chance, shape)
        assert best_by_tables(*case) == best_key(*case)


def nested_case(chance: Random, shape: tuple[int, int, int, int]) -> tuple[Topology, Free, Request]:
    """A fragmented machine of a shape, and a request that takes a good part of what is left."""
    packages, nodes, l3_groups, cores = shape
    widths = chance.choice(((2,), (2,), (1,), (1, 2), (4, 1)))
    levels: list[list[int]] = [[], [], [], []]
    cpu = 0
    for _ in range(packages):
        levels[0].append(0)
        for _ in range(nodes):
            levels[1].append(0)
            for _ in range(l3_groups):
                levels[2].append(0)
                for _ in range(cores):
                    width = chance.choice(widths)
                    levels[3].append(0)
                    for level in levels:
                        level[-1] |= ((1 << width) - 1) << cpu
                    cpu += width
    table = chance.choice(((21,), (21,), (12, 21), (11, 12, 21, 32)))
    machine = make_topology(
        packages=tuple(make_package(number, cpus) for number, cpus in enumerate(levels[0])),
        numa_nodes=tuple(
            make_numa_node(
                number,
                cpus,
                memory=0,
                distances={
                    other: 10 if other == number else chance.choice(table)
                    for other in range(packages * nodes)
                },
            )
            for number, cpus in enumerate(levels[1])
        ),
        l3_groups=tuple(levels[2]),
        cores=tuple(levels[3]),
    )
    pieces = machine.cores if chance.random() < 0.5 else [1 << cpu for cpu in cpus_of(machine.cpus)]
    share = chance.choice((0.2, 0.5, 0.8))
    pool = mask_of(cpu for piece in pieces if chance.random() < share for cpu in cpus_of(CpuMask(piece)))
    policy = chance.choice((Policy.EXCLUSIVE, Policy.EXCLUSIVE, Policy.SHARE))
    smts = tuple(Smt) if policy is Policy.EXCLUSIVE else (Smt.PREFER, Smt.REQUIRE)
    request = Request(
        chance.randint(1, max(1, min(48, pool.bit_count()))),
        PinningOptions(
            scope=chance.choice((Scope.ANY, Scope.ANY, Scope.ONE_SOCKET, Scope.ONE_NUMA)),
            policy=policy,
            smt=chance.choice(smts),
            emulator_threads=chance.choice(tuple(EmulatorThreads)),
        ),
    )
    return machine, Free(cpus=pool if request.owns_cpus else NO_CPUS, pool=pool), request


def best_by_tables(machine: Topology, free: Free, request: Request) -> Key | None:
    """The smallest key there is, on a machine whose levels nest and for a VM that needs no memory."""
    usable, need = whole_cores(machine, free, request), units(request)
    room = {node.id: (node.cpus & usable).bit_count() for node in machine.numa_nodes}
    if request.owns_cpus and request.options.smt is Smt.ISOLATE:
        room = {
            node.id: sum(1 for core in machine.cores if core & node.cpus & usable)
            for node in machine.numa_nodes
        }
    package_of = {node.id: machine.packages_of(node.cpus)[0] for node in machine.numa_nodes}
    ranked: dict[tuple[int, int, int, int], list[tuple[NumaId, ...]]] = {}
    most = 1 if request.options.scope is Scope.ONE_NUMA else len(room)
    for count in range(1, min(most, need) + 1):
        for chosen in combinations([node for node in room if room[node]], count):
            packages = len({package_of[node] for node in chosen})
            if packages > 1 and request.options.scope is Scope.ONE_SOCKET:
                continue
            if sum(room[node] for node in chosen) >= need:
                distances = [machine.distance(a, b) for a, b in combinations(chosen, 2)]
                rank = (packages, count, max(distances, default=0), sum(distances))
                ranked.setdefault(rank, []).append(chosen)
    if not ranked:
        return None
    rank = min(ranked)
    best = WORST
    for kinds in some_of({core.bit_count() for core in machine.cores}):
        inside = mask_of(
            cpu
            for core in machine.cores
            if core.bit_count() in kinds
            for cpu in cpus_of(CpuMask(core & usable))
        )
        tables = {
            node.id: table_of_node(machine, node.cpus & inside, request, need) for node in machine.numa_nodes
        }
        for chosen in ranked[rank]:
            cost = cheapest([tables[node] for node in chosen], need)
            if cost is not None:
                best = min(best, (*rank, (*rank, 0), cost[0], len(kinds), cost[1]))
    return best


def some_of(kinds: set[int]) -> list[tuple[int, ...]]:
    """Every choice of some kinds of cores."""
    return [chosen for count in range(1, len(kinds) + 1) for chosen in combinations(sorted(kinds), count)]


def table_of_node(machine: Topology, usable: int, request: Request, most: int) -> Table:
    """The cost of so many units of one NUMA node; only keys that can be had are in it, 0 is one."""
    isolated = request.owns_cpus and request.options.smt is Smt.ISOLATE
    table: Table = {0: (0, 0)}
    for l3 in machine.l3_groups:
        inside: Table = {0: (0, 0)}
        for core in machine.cores:
            width = (core & l3 & usable).bit_count()
            takes = dict.fromkeys(range(1, (min(1, width) if isolated else width) + 1), (0, 1))
            inside = together(inside, {0: (0, 0), **takes}, most)
        table = together(table, {take: (int(take > 0), cost[1]) for take, cost in inside.items()}, most)
    return table


def together(one: Mapping[int, tuple[int, int]], other: Mapping[int, tuple[int, int]], most: int) -> Table:
    """The least cost of so many units out of two places."""
    both: Table = {}
    for first, (groups, cores) in one.items():
        for second, (more_groups, more_cores) in other.items():
            cost = (groups + more_groups, cores + more_cores)
            if first + second <= most and cost < both.get(first + second, (1 << 30, 0)):
                both[first + second] = cost
    return both


def cheapest(tables: list[Table], need: int) -> tuple[int, int] | None:
    """The least cost of a need out of several NUMA nodes that must all give something; None if none."""
    total: Table = {0: (0, 0)}
    for table in tables:
        total = together(total, {take: cost for take, cost in table.items() if take}, need)
    return total.get(need)


@pytest.mark.parametrize("count", [12, 20, 24])
def test_of_many_numa_nodes_exactly_those_that_have_memory_are_used(count: int) -> None:
    machine = make_topology(
        packages=(make_package(0, (1 << 2 * count) - 1),),
        numa_nodes=tuple(make_numa_node(node, 3 << 2 * node, GIB * (node % 2)) for node in range(count)),
        l3_groups=tuple(3 << 2 * node for node in range(count)),
        cores=tuple(3 << 2 * node for node in range(count)),
    )
    request = Request(count // 2, PinningOptions(scope=Scope.ANY), memory=count // 2 * GIB)
    answer = place(machine, free_of(machine, Ledger()), request)
    assert isinstance(answer, Placement)
    assert answer.numa_nodes == tuple(range(1, count, 2))
