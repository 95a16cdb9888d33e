"""Searches that would take minutes stop at their bound, and their answer still keeps every rule.

Work is counted in steps, so that these tests state the same on every computer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from kvplace.core.allocator import available_units, group_knapsack
from kvplace.core.allocator.allocate import place
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import CpuMask
from kvplace.core.search_budget import SearchBudget
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import best_key
from tests.core.allocator.random_cases import crossed_case, random_case, scarce_memory_case
from tests.core.allocator.validity import key_of_valid
from tests.core.machines import GIB, make_numa_node, make_package, make_topology
from tests.profiles import rounds


def two_packages_to_each_numa_node(nodes: int, cpus: int, memory: int) -> Topology:
    """NUMA nodes in a hypercube, of two packages each."""
    masks = [((1 << cpus) - 1) << cpus * package for package in range(2 * nodes)]
    return make_topology(
        packages=tuple(make_package(number, mask) for number, mask in enumerate(masks)),
        numa_nodes=tuple(
            make_numa_node(
                node,
                masks[2 * node] | masks[2 * node + 1],
                memory=memory,
                distances={other: 10 + 10 * (node ^ other).bit_count() for other in range(nodes)},
            )
            for node in range(nodes)
        ),
        l3_groups=tuple(masks),
        cores=tuple(1 << cpu for cpu in range(2 * nodes * cpus)),
    )


def two_packages_with_a_cpu_of_each_numa_node(nodes: int, reserved: int) -> Topology:
    every = range(2 * nodes)
    return make_topology(
        packages=tuple(make_package(number, ((1 << nodes) - 1) << nodes * number) for number in range(2)),
        numa_nodes=tuple(make_numa_node(n, 1 << n | 1 << nodes + n, memory=GIB) for n in range(nodes)),
        l3_groups=tuple(1 << cpu for cpu in every),
        cores=tuple(1 << cpu for cpu in every),
        reserved=reserved,
    )


@contextmanager
def counted_steps() -> Iterator[list[int]]:
    """Count the steps that searches take."""
    steps = [0]
    spend = SearchBudget.spend

    def counting(budget: SearchBudget, amount: int = 1) -> None:
        steps[0] += amount
        spend(budget, amount)

    with patch.object(SearchBudget, "spend", counting):
        yield steps


@pytest.mark.parametrize("memory", [9, 20])
@pytest.mark.parametrize("nodes", [32, 64])
def test_the_nearest_of_many_numa_nodes_are_sought_within_a_bound(nodes: int, memory: int) -> None:
    machine = two_packages_to_each_numa_node(nodes, 2, GIB)
    free = free_of(machine, Ledger())
    request = Request(2, PinningOptions(scope=Scope.ANY), memory=memory * GIB)
    with counted_steps() as steps:
        answer = place(machine, free, request)
    assert isinstance(answer, Placement)
    key = key_of_valid(machine, free, request, answer)
    assert key[:2] == (memory, memory)  # sockets and NUMA nodes are the fewest all the same
    assert steps[0] < 2 * available_units._NUMA_STEPS
    if (nodes, memory) == (64, 20):
        assert steps[0] > available_units._NUMA_STEPS


def test_fourteen_numa_nodes_with_a_cpu_in_each_of_two_packages_share_it_out_evenly() -> None:
    nodes = 14
    machine = two_packages_with_a_cpu_of_each_numa_node(nodes, reserved=1 << 13 | 1 << 14)
    free = free_of(machine, Ledger())
    request = Request(nodes, PinningOptions(scope=Scope.SPREAD_SOCKETS), memory=nodes * GIB)
    answer = place(machine, free, request)
    assert isinstance(answer, Placement), answer
    assert key_of_valid(machine, free, request, answer)[:2] == (2, nodes)


def test_a_vm_that_two_packages_cannot_share_evenly_is_refused_and_will_never_fit() -> None:
    nodes = 14
    # The first package has six CPUs left and the second 13: neither 7 and 7 nor 14 in one.
    machine = two_packages_with_a_cpu_of_each_numa_node(nodes, reserved=0xFF | 1 << 27)
    request = Request(nodes, PinningOptions(scope=Scope.SPREAD_SOCKETS), memory=nodes * GIB)
    answer = place(machine, free_of(machine, Ledger()), request)
    assert isinstance(answer, Refusal)
    assert answer.never


@pytest.mark.parametrize("question", [random_case, scarce_memory_case, crossed_case])
def test_without_a_single_step_every_vm_that_fits_is_placed_and_every_rule_kept(
    question: Callable[[int, int], tuple[Topology, Free, Request]],
) -> None:
    placed = worse = 0
    for number in range(700_000, 700_000 + rounds(250, quick=60)):
        case = question(number, 10)
        with (
            patch.object(available_units, "_NUMA_STEPS", 0),
            patch.object(group_knapsack, "_CORE_STEPS", 0),
        ):
            answer = place(*case)
        best = best_key(*case)
        assert isinstance(answer, Placement) == (best is not None), number
        if isinstance(answer, Placement):
            assert best is not None
            placed += 1
            worse += key_of_valid(*case, answer) > best
    assert placed > rounds(80, quick=15)
    assert worse < placed / 5


def test_numa_nodes_whose_shared_and_own_l3_groups_are_of_other_sizes_are_not_taken_for_alike() -> None:
    # Each node has 4 CPUs behind one L3 group and 2 behind another; one group is shared with the next node.
    machine = make_topology(
        packages=(make_package(0, 0xFFF),),
        numa_nodes=(make_numa_node(0, 0x03F, memory=0), make_numa_node(1, 0xFC0, memory=0)),
        l3_groups=(0x00F, 0x0F0 & 0x030 | 0x3C0, 0xC00),
        cores=tuple(1 << cpu for cpu in range(12)),
    )
    free = Free(CpuMask(machine.cpus), CpuMask(machine.cpus))
    for vcpus in range(1, 13):
        request = Request(vcpus, PinningOptions(scope=Scope.ANY))
        answer = place(machine, free, request)
        assert isinstance(answer, Placement)
        key_of_valid(machine, free, request, answer)
