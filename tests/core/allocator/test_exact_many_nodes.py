"""Machines with more NUMA nodes than any client can check each set of: nothing nearer is overlooked.

Fourteen nodes, none like another in what is free, in memory and in distances, have thousands of sets of one
size. Here each is compared, by counting alone; which CPUs are taken inside does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from random import Random

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import Free
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import CpuMask, NumaId
from kvplace.core.topology import Topology
from tests.core.allocator.validity import key_of_valid
from tests.core.machines import GIB, make_numa_node, make_package, make_topology

NODES = 14
CPUS = 8
"""Of each node."""

Rank = tuple[int, int, int, int]


@pytest.mark.parametrize("packages", [1, 2, NODES])
@pytest.mark.parametrize("scope", [Scope.ANY, Scope.SPREAD_NUMA])
@pytest.mark.parametrize("memory", [0, 4])
def test_of_many_unlike_numa_nodes_the_nearest_that_serve_are_used(
    packages: int, scope: Scope, memory: int
) -> None:
    chance = Random(f"{packages} {scope.value} {memory}")
    placed = 0
    for number in range(4):
        machine, free = crowded(chance, packages)
        request = Request(
            free.cpus.bit_count() * chance.choice((4, 5, 6, 8)) // 10,
            PinningOptions(scope=scope),
            memory=memory * NODES * GIB,
        )
        answer = place(machine, free, request)
        found = None
        if isinstance(answer, Placement):
            placed += 1
            found = key_of_valid(machine, free, request, answer)[:4]
        assert found == min(ranks(machine, free, request), default=None), number
    assert placed


def crowded(chance: Random, packages: int) -> tuple[Topology, Free]:
    """A machine whose nodes lie at random distances, with a random part of each of them free."""
    far = {pair: chance.randint(11, 40) for pair in combinations(range(NODES), 2)}
    of_node = [((1 << CPUS) - 1) << CPUS * node for node in range(NODES)]
    per_package = NODES // packages
    machine = make_topology(
        packages=tuple(
            make_package(number, sum(of_node[number * per_package : (number + 1) * per_package]))
            for number in range(packages)
        ),
        numa_nodes=tuple(
            make_numa_node(
                node,
                cpus,
                memory=16 * GIB,
                distances={n: far[min(n, node), max(n, node)] for n in range(NODES) if n != node},
            )
            for node, cpus in enumerate(of_node)
        ),
        l3_groups=tuple(of_node),
        cores=tuple(1 << cpu for cpu in range(NODES * CPUS)),
    )
    cpus = sum(
        1 << cpu
        for cpus in of_node
        for cpu in chance.sample(list(cpus_of(CpuMask(cpus))), chance.randint(2, CPUS))
    )
    return machine, Free(
        cpus=CpuMask(cpus),
        pool=CpuMask(cpus),
        memory=tuple((NumaId(node), chance.randint(0, 10) * GIB) for node in range(NODES)),
    )


def ranks(machine: Topology, free: Free, request: Request) -> Iterator[Rank]:
    """Sockets, nodes, largest and summed distance of the smallest sets of nodes that serve."""
    units = [(free.cpus & node.cpus).bit_count() for node in machine.numa_nodes]
    package_of = [machine.packages_of(node.cpus) for node in machine.numa_nodes]
    memory = dict(free.memory)
    for count in range(1, NODES + 1):
        for chosen in combinations(range(NODES), count):
            if sum(units[node] for node in chosen) < request.vcpus:
                continue
            if sum(memory[NumaId(node)] for node in chosen) < request.memory:
                continue
            if request.options.scope is Scope.SPREAD_NUMA and not any(
                shares_evenly([units[node] for node in chosen], giving, request.vcpus)
                for giving in range(1, count + 1)
            ):
                continue
            far = [machine.distance(NumaId(one), NumaId(other)) for one, other in combinations(chosen, 2)]
            sockets = len({package_of[node] for node in chosen})
            yield sockets, count, max(far, default=0), sum(far)


def shares_evenly(units: list[int], giving: int, need: int) -> bool:
    """Whether so many of the nodes can give equal shares; the others give memory alone."""
    share, larger = divmod(need, giving)
    most = sorted(units, reverse=True)[:giving]
    return min(most) >= share and sum(of_node > share for of_node in most) >= larger


@pytest.mark.parametrize("scope", [Scope.ANY, Scope.SPREAD_SOCKETS, Scope.SPREAD_NUMA])
def test_half_of_thirty_two_sockets_of_two_numa_nodes_each_is_found_among_more_sets_than_can_be_tried(
    scope: Scope,
) -> None:
    sockets = 32
    machine = make_topology(
        packages=tuple(make_package(socket, 0b1111 << 4 * socket) for socket in range(sockets)),
        numa_nodes=tuple(
            make_numa_node(
                node,
                0b11 << 2 * node,
                memory=0,
                distances={other: 10 if other == node else 20 for other in range(64)},
            )
            for node in range(2 * sockets)
        ),
        l3_groups=tuple(0b1111 << 4 * socket for socket in range(sockets)),
        cores=tuple(1 << cpu for cpu in range(4 * sockets)),
    )
    free = Free(CpuMask(machine.cpus), CpuMask(machine.cpus))
    answer = place(machine, free, Request(2 * sockets, PinningOptions(scope=scope)))
    assert isinstance(answer, Placement)
    assert (len(answer.packages), len(answer.numa_nodes)) == (sockets // 2, sockets)
