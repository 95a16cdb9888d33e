"""Machines where memory forces NUMA nodes on a VM, and the bounds of NUMA sets.

The bound of a NUMA set is compared with what is found in it: a bound that is too high would hide a better
NUMA set, which only a machine with several equally near ones would show.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvplace.core.allocator.allocate import _ranked, place
from kvplace.core.allocator.available_units import AvailableUnits
from kvplace.core.allocator.group_knapsack import GroupKnapsack
from kvplace.core.allocator.numa_sets import best_numa_sets, giving_cpus
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import best_key
from tests.core.allocator.random_cases import crossed_case, random_case, scarce_memory_case
from tests.core.allocator.shapes import machine, slit
from tests.core.allocator.validity import key_of_valid
from tests.core.machines import GIB

Case = tuple[Topology, Free, Request]


def placed(case: Case) -> Placement:
    """The placement, as good as the best of all sets of CPUs."""
    answer = place(*case)
    assert isinstance(answer, Placement), answer
    assert key_of_valid(*case, answer) == best_key(*case)
    return answer


def test_l3_groups_that_memory_forces_on_a_vm_bring_their_wider_cores() -> None:
    far = slit(*[[10 if a == b else 11 if a // 4 == b // 4 else 20 for b in range(8)] for a in range(8)])
    groups = ["0-7", "8-9", "10-11", "12-13", "14-15", "16-17", "18-19", "20-21"]
    on = machine(
        packages=["0-21"],
        nodes=groups,
        l3=groups,
        cores=[*map(str, range(8)), *groups[1:6], "18", "19", "20", "21"],
        distances=far,
        memory=[1] * 8,
    )
    case = (on, free_of(on, Ledger()), Request(8, memory=4 * GIB))
    assert placed(case).numa_nodes == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("question", "first"), [(random_case, 0), (scarce_memory_case, 218_000), (crossed_case, 0)]
)
def test_no_choice_in_a_numa_set_is_better_than_its_bound(
    question: Callable[[int, int], Case], first: int
) -> None:
    looked_into = 0
    for number in range(first, first + 400):
        case = question(number, 12)
        available = AvailableUnits(*case)
        for numa_set in giving_cpus(available, best_numa_sets(available)):
            knapsack = GroupKnapsack(available)
            choice = knapsack.serve(numa_set)
            if choice is not None:
                assert knapsack.bound(numa_set) <= _ranked(available, numa_set, choice).rank, number
                looked_into += 1
    assert looked_into > 200


def test_equal_shares_of_numa_nodes_behind_common_l3_groups_use_as_few_of_these_as_can_be() -> None:
    on = machine(
        packages=["0-11"],
        nodes=["0-1", "2-3", "4-5", "6-7", "8-9", "10-11"],
        l3=["0-3", "4-7", "8-11"],
        cores=[str(cpu) for cpu in range(12)],
        memory=[0, 2, 2, 2, 2, 0],
    )
    free = free_of(on, Ledger()).within(parse_cpu_list("0,2-5,7-11"))
    request = Request(4, PinningOptions(scope=Scope.SPREAD_NUMA), memory=8 * GIB)
    found = placed((on, free, request))
    assert found.numa_nodes == (1, 2, 3, 4)
    assert len(found.l3_groups) == 3
    fewer = Request(2, PinningOptions(scope=Scope.SPREAD_NUMA), memory=8 * GIB)
    assert placed((on, free, fewer)).l3_groups == (1,)


def test_an_eighth_numa_node_is_taken_where_the_packages_of_seven_cannot_share_six_vcpus_evenly() -> None:
    far = [[10 if one == other else 21 for other in range(8)] for one in range(8)]
    on = machine(
        packages=["0-4", "5-6", "7-8"],
        nodes=["0", "1", "2", "3", "4", "5-6", "7", "8"],
        l3=["0-4", "5-6", "7-8"],
        cores=[str(cpu) for cpu in range(9)],
        distances=slit(*far),
        memory=[3, 3, 3, 3, 3, 3, 3, 1],
    )
    request = Request(6, PinningOptions(scope=Scope.SPREAD_SOCKETS), memory=20 * GIB)
    assert len(placed((on, free_of(on, Ledger()), request)).numa_nodes) == 8
