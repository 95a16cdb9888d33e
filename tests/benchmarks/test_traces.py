"""The columns of the comparison of allocators count what their heads name."""

from __future__ import annotations

import pytest

from benchmarks._load import EVEN, Sizes, vm_of
from benchmarks._traces import PeerMachine, RoomMakingMachine, kvplace, nodes_when_empty, outcome_of, run
from benchmarks.fragmentation import mean_and_deviation
from benchmarks.peers.best_fit import best_fit
from kvplace.core.cpuset import lowest, mask_of, parse_cpu_list
from kvplace.core.scalars import CpuMask
from tests.core.machines import make_numa_node, make_package, make_topology

FOUR_NODES = make_topology(
    packages=tuple(make_package(number, 0xFFFF << 16 * number) for number in range(2)),
    numa_nodes=tuple(make_numa_node(number, 0xFF << 8 * number, memory=0) for number in range(4)),
    l3_groups=tuple(0xF << 4 * number for number in range(8)),
    cores=tuple(1 << cpu for cpu in range(32)),
)
"""Two sockets of two NUMA nodes of two L3 groups of four CPUs."""


def _columns(taken: str, chosen: str) -> set[str]:
    """The columns that count a VM which gets `chosen` while others have `taken`."""
    cpus = parse_cpu_list(chosen)
    machine = PeerMachine(FOUR_NODES, lambda *_: cpus)
    machine.free &= ~parse_cpu_list(taken)
    outcome = outcome_of(FOUR_NODES, machine, vm_of(0, cpus.bit_count()))
    return {name for name, number in outcome.items() if number}


def test_a_vm_that_sits_as_well_as_it_can_is_in_no_column() -> None:
    assert _columns("", "0-3") == set()
    assert _columns("0-1", "4-7") == set()
    assert _columns("", "0-15") == set()


def test_more_sockets_nodes_or_l3_groups_than_necessary_are_avoidable() -> None:
    assert _columns("", "0-1,16-17") == {"sockets", "numa"}
    assert _columns("", "0-1,8-9") == {"numa"}
    assert _columns("", "0-1,4-5") == {"l3"}


def test_fewer_sockets_excuse_more_nodes() -> None:
    one_socket_left_in_three_nodes = "0-3,16-19"  # 8 CPUs: nodes 1 and 3 have them whole, both sockets 12
    assert _columns(one_socket_left_in_three_nodes, "4-7,8-15") == set()


def test_a_vm_is_forced_when_no_fewer_nodes_have_the_room_whatever_was_chosen() -> None:
    half_of_every_node = "0-3,8-11,16-19,24-27"
    assert _columns(half_of_every_node, "4-7,12-15") == {"forced"}
    assert _columns(half_of_every_node, "4-7,20-23") == {"forced", "sockets"}
    assert _columns(half_of_every_node, "4-7") == set()


def test_a_cpu_in_use_is_a_column_of_its_own_and_the_books_stay_right() -> None:
    machine = PeerMachine(FOUR_NODES, lambda *_: mask_of([0, 1]))
    machine.free &= ~1
    vm = vm_of(0, 2)
    assert outcome_of(FOUR_NODES, machine, vm) == {"in_use": 1, "forced": 0}
    assert machine.free.bit_count() == 29
    machine.leave(vm)
    assert machine.free.bit_count() == 31


def test_an_allocator_that_refuses_while_cpus_are_free_is_not_a_peer() -> None:
    with pytest.raises(AssertionError, match="a VM of 2 CPUs was refused while 32 were free"):
        outcome_of(FOUR_NODES, PeerMachine(FOUR_NODES, lambda *_: None), vm_of(0, 2))


def test_the_nodes_that_an_empty_machine_needs() -> None:
    assert [nodes_when_empty(FOUR_NODES, count) for count in (1, 8, 9, 16, 32)] == [1, 1, 2, 2, 4]


@pytest.mark.parametrize("seed", range(3))
def test_kvplace_splits_nothing_that_need_not_be_split(seed: int) -> None:
    tally = run(FOUR_NODES, PeerMachine(FOUR_NODES, kvplace), EVEN, seed, count=150, uncounted=20)
    assert tally.arrived == 130
    assert (tally.sockets, tally.numa, tally.l3, tally.in_use, tally.refused) == (0, 0, 0, 0, 0)


def test_an_allocator_that_takes_the_lowest_cpus_splits_vms_and_best_fit_does_not() -> None:
    first = PeerMachine(FOUR_NODES, lambda _, free, count: lowest(CpuMask(free), count))
    careless = run(FOUR_NODES, first, EVEN, 1, count=150)
    careful = run(FOUR_NODES, PeerMachine(FOUR_NODES, best_fit), EVEN, 1, count=150)
    assert careless.numa > 10
    assert careful.numa == 0


def test_forced_vms_are_refused_in_a_strict_run_and_only_they() -> None:
    strict = run(FOUR_NODES, PeerMachine(FOUR_NODES, best_fit), EVEN, 1, count=150, strict=True)
    assert 0 < strict.refused == strict.forced < 75


def test_moves_leave_fewer_vms_forced_and_no_vm_on_anothers_cpus() -> None:
    mix = Sizes("of fours and eights", (4, 4, 6, 8))
    still = run(FOUR_NODES, PeerMachine(FOUR_NODES, kvplace), mix, 2, count=150)
    moving = run(FOUR_NODES, RoomMakingMachine(FOUR_NODES, 2), mix, 2, count=150)
    assert moving.moves > 0
    assert moving.forced < still.forced
    assert moving.in_use == 0


def test_shares_of_vms_and_their_spread() -> None:
    tally = run(FOUR_NODES, PeerMachine(FOUR_NODES, best_fit), EVEN, 1, count=50)
    assert tally.percent("arrived") == 100
    assert mean_and_deviation([1.0, 2.0, 3.0]) == "2.0 ± 1.0"
    assert mean_and_deviation([2.0]) == "2.0 ± 0.0"
    assert mean_and_deviation([0.0, 0.0]) == "0"
