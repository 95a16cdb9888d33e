"""A running VM gets other cores only if they are better: compared with every choice on small machines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from random import Random

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.defragmentation import better_placement, cpus_in_places, left_by, places
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import Free
from kvplace.core.occupant import Occupant, locality_of
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import Topology
from tests.core.cluster.clusters import machine
from tests.core.machines import make_node
from tests.core.moves.fragmented import Case, fragmented
from tests.profiles import rounds


def _without(case: Case, vm: Occupant) -> Free:
    return make_node(case.topology, [one for one in case.occupants if one is not vm]).free


def _every_placement(topology: Topology, free: Free, vm: Occupant) -> Iterator[Placement]:
    cpus = list(cpus_of(free.cpus))
    for size in range(vm.request.vcpus, len(cpus) + 1):
        for chosen in combinations(cpus, size):
            found = try_place(topology, free.within(mask_of(chosen)), vm.request)
            if found is not None:
                yield found


def _sits(topology: Topology, one: Placement) -> tuple[int, ...]:
    return (
        *locality_of(topology, one),
        sum(1 for group in topology.l3_groups if group & one.cpus),
        sum(1 for core in topology.cores if core & one.cpus),
    )


def test_a_vm_gets_the_best_cores_that_there_are_and_none_where_its_own_are_the_best() -> None:
    chance = Random(7)
    moved = stayed = 0
    for _ in range(rounds(150, 15)):
        case = fragmented(chance, most_cpus=8)
        for vm in case.occupants:
            free = _without(case, vm)
            best = min(_sits(case.topology, one) for one in _every_placement(case.topology, free, vm))
            after = better_placement(case.topology, free, vm.request, vm.placement)
            sits = _sits(case.topology, vm.placement if after is None else after)
            assert sits == best
            moved += after is not None
            stayed += after is None
    assert moved > rounds(10, 0)
    assert stayed > 10


def test_better_cores_make_the_vm_sit_better_or_leave_more_places_and_no_vm_has_them() -> None:
    chance = Random(8)
    for_others = 0
    for _ in range(rounds(600, 60)):
        case = fragmented(chance, most_cpus=16)
        for vm in case.occupants:
            free = _without(case, vm)
            after = better_placement(case.topology, free, vm.request, vm.placement)
            if after is None:
                continue
            assert not after.owned & ~free.cpus
            was, now = (_sits(case.topology, one) for one in (vm.placement, after))
            assert now <= was
            if now == was:
                before, left = (left_by(free, one) for one in (vm.placement, after))
                assert cpus_in_places(case.topology, left) > cpus_in_places(case.topology, before)
                for_others += 1
    assert for_others > 10


def test_a_vm_that_was_given_better_cores_gets_no_others() -> None:
    chance = Random(9)
    for _ in range(rounds(300, 30)):
        case = fragmented(chance, most_cpus=16)
        for vm in case.occupants:
            free = _without(case, vm)
            after = better_placement(case.topology, free, vm.request, vm.placement)
            if after is not None:
                assert better_placement(case.topology, free, vm.request, after) is None


def test_places_count_the_vms_of_one_size_that_single_numa_nodes_hold() -> None:
    topology = machine(8, 8)
    free = CpuMask(0b00111111_11111111)
    assert [places(topology, free, size) for size in (4, 8, 16)] == [3, 1, 0]
    assert cpus_in_places(topology, free) == 3 * 4 + 8


def test_a_vm_over_two_numa_nodes_comes_together_when_one_has_room() -> None:
    topology = machine(4, 4)
    request = Request(4, PinningOptions(Scope.ANY))
    split = try_place(topology, make_node(topology, ()).free.within(CpuMask(0b00110011)), request)
    assert split is not None
    assert len(split.numa_nodes) == 2
    after = better_placement(topology, make_node(topology, ()).free, request, split)
    assert after is not None
    assert len(after.numa_nodes) == 1
