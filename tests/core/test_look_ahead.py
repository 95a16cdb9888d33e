"""What a choice of cores takes from later VMs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.look_ahead import SIZES, slots_lost

FREE = st.integers(0, 600)


@given(FREE, FREE)
def test_taking_cpus_costs_something_and_taking_none_costs_nothing(before: int, after: int) -> None:
    cost = slots_lost(before, after)
    assert (cost > 0) == (before > after)
    assert (cost == 0) == (before == after)


@given(FREE, FREE, FREE)
def test_two_steps_cost_as_much_as_one(first: int, second: int, third: int) -> None:
    assert slots_lost(first, second) + slots_lost(second, third) == slots_lost(first, third)


@given(st.sampled_from(SIZES), FREE)
def test_no_group_is_cheaper_for_a_usual_vm_than_a_hole_of_its_size(size: int, more: int) -> None:
    assert slots_lost(size, 0) <= slots_lost(size + more, more)


@given(st.sampled_from(SIZES), st.integers(1, 600))
def test_of_groups_that_lose_the_same_slots_the_fuller_one_is_cheaper(size: int, more: int) -> None:
    largest = SIZES[-1]
    assert slots_lost(size + more, more) < slots_lost(size + more + largest, more + largest)


@given(st.sampled_from(SIZES[1:]), st.sampled_from(SIZES))
def test_a_slot_is_not_broken_while_a_broken_one_will_do(slot: int, size: int) -> None:
    if size < slot:
        assert slots_lost(slot - size, slot - 2 * size) < slots_lost(slot, slot - size)


def test_a_whole_numa_node_is_left_whole_while_another_has_room_beside_its_large_slot() -> None:
    assert slots_lost(40, 36) < slots_lost(32, 28)
    assert slots_lost(36, 32) < slots_lost(64, 60)
