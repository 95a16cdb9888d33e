"""The cores that a choice takes from later VMs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.allocator.objectives import LARGE, fragmentation_cost
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.free_resources import Free
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Request, Scope
from tests.core.allocator.shapes import machine

FREE = st.integers(0, 600)


@given(FREE, FREE)
def test_taking_cpus_costs_something_and_taking_none_costs_nothing(before: int, after: int) -> None:
    cost = fragmentation_cost(before, after)
    assert (cost > 0) == (before > after)
    assert (cost == 0) == (before == after)


@given(FREE, FREE, FREE)
def test_two_steps_cost_as_much_as_one(first: int, second: int, third: int) -> None:
    assert fragmentation_cost(first, second) + fragmentation_cost(second, third) == fragmentation_cost(
        first, third
    )


@given(st.sampled_from(LARGE), FREE)
def test_no_group_is_cheaper_for_a_usual_vm_than_a_free_block_of_its_size(size: int, more: int) -> None:
    assert fragmentation_cost(size, 0) <= fragmentation_cost(size + more, more)


@given(st.sampled_from(LARGE), st.integers(1, 600))
def test_of_groups_that_lose_the_same_slots_the_fuller_one_is_cheaper(size: int, more: int) -> None:
    largest = LARGE[-1]
    assert fragmentation_cost(size + more, more) < fragmentation_cost(size + more + largest, more + largest)


@given(st.sampled_from(LARGE), st.sampled_from((2, 4, 8, 12)))
def test_a_slot_is_not_broken_while_a_broken_one_will_do(slot: int, size: int) -> None:
    assert fragmentation_cost(slot - size, slot - 2 * size) < fragmentation_cost(slot, slot - size)


def test_a_whole_numa_node_is_left_whole_while_another_has_room_beside_its_large_slot() -> None:
    assert fragmentation_cost(40, 36) < fragmentation_cost(32, 28)
    assert fragmentation_cost(36, 32) < fragmentation_cost(64, 60)


SUB_NUMA = machine(
    packages=["0-29"],
    nodes=["0-5", "6-11", "12-17", "18-23", "24-29"],
    l3=["0-29"],
    cores=[str(cpu) for cpu in range(30)],
)
"""Five NUMA nodes under one L3, as sub-NUMA clusters are: all sets of two are as near."""


def numa_nodes_and_cpus(free: str, vcpus: int) -> tuple[tuple[int, ...], int]:
    cpus = parse_cpu_list(free)
    answer = place(SUB_NUMA, Free(cpus, cpus), Request(vcpus, PinningOptions(Scope.ANY)))
    assert isinstance(answer, Placement)
    return answer.numa_nodes, answer.cpus


def test_a_vm_over_two_numa_nodes_takes_the_two_that_it_fills_however_many_pairs_there_are() -> None:
    nodes, cpus = numa_nodes_and_cpus("0-5,6-10,12-15,18-20,24-25", 7)
    assert nodes == (2, 3)
    assert cpus == parse_cpu_list("12-15,18-20")


def test_the_cpus_left_free_lie_in_the_smaller_numa_node_under_a_common_l3() -> None:
    nodes, cpus = numa_nodes_and_cpus("0-3,6-10", 7)
    assert nodes == (0, 1)
    assert cpus == parse_cpu_list("0-1,6-10")
