"""Making room: the cheapest VMs go, in safe steps, and none of them loses by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.free import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.moves.make_room import Occupant, Room, make_room
from kvplace.core.occupant import RunningVms, locality_of, within
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.topology import NumaNode, Package, Topology
from kvplace.machines.shipped import read_machine
from tests.core.allocator.running import occupied
from tests.core.machines import GIB, requests, topologies
from tests.core.requests import request_with

ROME = read_machine("2x-epyc-7763-nps4")


def _machine(nodes: int, width: int, memory: int = 0, pages: int = 0) -> Topology:
    each = [mask_of(range(node * width, (node + 1) * width)) for node in range(nodes)]
    return Topology(
        packages=(Package(0, mask_of(range(nodes * width))),),
        numa_nodes=tuple(
            NumaNode(number, cpus, memory, {GIB: pages} if pages else {}) for number, cpus in enumerate(each)
        ),
        l3_groups=tuple(each),
        cores=tuple(1 << cpu for cpu in range(nodes * width)),
    )


def _runs(topology: Topology, uid: str, cpus: str, **wish: Any) -> Occupant:
    mask = parse_cpu_list(cpus)
    request = request_with(**{"vcpus": mask.bit_count(), "scope": Scope.ONE_NUMA, **wish})
    free = free_of(topology, Ledger())
    found = place(topology, within(free, mask), request)
    assert isinstance(found, Placement)
    return Occupant(uid, request, found)


def _moves(room: Room | None) -> list[tuple[str, int, int]]:
    assert room is not None
    return [(move.id, move.before.cpus, move.after.cpus) for move in room.moves]


def test_the_vm_with_the_least_memory_goes() -> None:
    machine = _machine(2, 6, memory=64 * GIB)
    occupants = [
        _runs(machine, "heavy", "0-1", memory=32 * GIB),
        _runs(machine, "light", "2-3", memory=2 * GIB),
        _runs(machine, "other", "6-9", memory=8 * GIB),
    ]
    room = make_room(machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_NUMA), memory=GIB))
    assert _moves(room) == [("light", 0b1100, 0b11 << 10)]
    assert room is not None
    assert room.bytes_moved == 2 * GIB


def test_a_move_inside_a_numa_node_costs_nothing_and_is_preferred() -> None:
    machine = Topology(
        packages=(Package(0, mask_of(range(16))),),
        numa_nodes=(
            NumaNode(0, mask_of(range(8)), 16 * GIB),
            NumaNode(1, mask_of(range(8, 16)), 16 * GIB),
        ),
        l3_groups=tuple(0b1111 << first for first in range(0, 16, 4)),
        cores=tuple(1 << cpu for cpu in range(16)),
    )
    occupants = [
        _runs(machine, "a", "0-1", memory=GIB),
        _runs(machine, "b", "4-5", memory=GIB),
        _runs(machine, "c", "8-9", memory=GIB),
        _runs(machine, "d", "12-13", memory=GIB),
    ]
    room = make_room(machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_L3)))
    assert room is not None
    assert len(room.moves) == 1
    assert room.bytes_moved == 0


def test_a_vm_over_two_numa_nodes_changes_cpus_on_one_of_them_rather_than_take_its_memory_along() -> None:
    machine = _machine(2, 6, memory=16 * GIB)
    wide = Request(3, PinningOptions(scope=Scope.ANY, policy=Policy.SHARE), memory=3 * GIB)
    lies = place(machine, within(free_of(machine, Ledger()), parse_cpu_list("2,5,11")), wide)
    assert isinstance(lies, Placement)
    occupants = [
        Occupant("wide", wide, lies),
        _runs(machine, "full", "0-1,3"),
        _runs(machine, "shares", "7-9", policy=Policy.SHARE),
    ]
    room = make_room(machine, occupants, Request(3, PinningOptions(scope=Scope.ONE_NUMA)))
    assert room is not None
    assert [(move.id, move.bytes_moved, move.after.numa_nodes) for move in room.moves] == [
        ("wide", 0, (0, 1))
    ]
    assert room.placement.cpus == parse_cpu_list("6,10-11")


def test_memory_and_huge_pages_must_fit_where_a_vm_goes() -> None:
    machine = _machine(3, 4, memory=8 * GIB, pages=4)
    paged = {"memory": 3 * GIB, "huge_pages": {GIB: 3}}
    occupants = [
        _runs(machine, "a", "0-1", **paged),
        _runs(machine, "b", "4-5", **paged),
        _runs(machine, "c", "8-9", memory=GIB),
    ]
    room = make_room(machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_NUMA)))
    assert _moves(room) == [("c", 0b11 << 8, 0b11 << 2)]
    occupants[2] = _runs(machine, "c", "8-9", **paged)
    assert make_room(machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_NUMA))) is None


def test_an_isolated_vm_goes_where_it_leaves_fewer_siblings_idle() -> None:
    uneven = replace(_machine(1, 4), cores=(0b0101, 0b0010, 0b1000))
    lavish = _runs(uneven, "isolated", "0-2", vcpus=2, smt=Smt.ISOLATE)
    assert lavish.placement.owned == 0b0111
    room = make_room(uneven, [lavish], Request(1, PinningOptions(emulator_threads=EmulatorThreads.ISOLATE)))
    assert _moves(room) == [("isolated", lavish.placement.cpus, 0b1010)]


def test_a_vm_that_lies_mostly_outside_the_cpus_that_may_be_used_asks_for_no_more_of_them() -> None:
    plain = _machine(3, 4)
    uneven = replace(plain, cores=(*plain.cores[:8], mask_of([8, 11]), mask_of([9]), mask_of([10])))
    occupants = [_runs(uneven, "a", "0-1"), _runs(uneven, "b", "4-5"), _runs(uneven, "outside", "8-10")]
    room = make_room(
        uneven, occupants, Request(4, PinningOptions(scope=Scope.ONE_NUMA)), only=parse_cpu_list("0-7,10")
    )
    assert len(_moves(room)) == 1


def test_what_does_not_move_stays() -> None:
    machine = _machine(2, 4)
    free_to_go = [_runs(machine, "a", "0-1"), _runs(machine, "b", "4-5")]
    request = Request(4, PinningOptions(scope=Scope.ONE_NUMA))
    assert [uid for uid, _, _ in _moves(make_room(machine, free_to_go, request))] == ["a"]
    assert [uid for uid, _, _ in _moves(make_room(machine, free_to_go, request, fixed={"a"}))] == ["b"]
    assert make_room(machine, free_to_go, request, fixed={"a", "b"}) is None
    rooted = [
        _runs(machine, uid, cpus, policy=Policy.IMMOVABLE) for uid, cpus in (("a", "0-1"), ("b", "4-5"))
    ]
    assert make_room(machine, rooted, request) is None


def test_a_vm_makes_way_for_one_that_makes_way_before_it_does() -> None:
    machine = _machine(3, 4)
    occupants = [
        _runs(machine, "large", "0-2"),
        _runs(machine, "small", "4-5"),
        _runs(machine, "rest-1", "6"),
        _runs(machine, "rest-2", "8-9"),
    ]
    room = make_room(
        machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_NUMA)), fixed={"rest-1", "rest-2"}
    )
    assert _moves(room) == [("small", 0b11 << 4, 0b11 << 10), ("large", 0b111, 0b1011 << 4)]


def test_a_vm_that_lies_well_already_moves_nobody_and_one_that_never_fits_gets_none() -> None:
    machine = _machine(2, 4)
    occupants = [_runs(machine, "a", "0-1")]
    assert make_room(machine, occupants, Request(2, PinningOptions(scope=Scope.ONE_NUMA))) is not None
    assert make_room(machine, occupants, Request(5, PinningOptions(scope=Scope.ONE_NUMA))) is None
    assert make_room(machine, occupants, Request(7, PinningOptions(scope=Scope.ANY))) is None


def test_a_scattered_fit_is_not_well_and_moves_are_sought() -> None:
    machine = _machine(2, 4)
    occupants = [_runs(machine, "a", "0-1"), _runs(machine, "b", "4-5")]
    scattered = place(
        machine, RunningVms(machine, occupants, None).free({}), Request(4, PinningOptions(scope=Scope.ANY))
    )
    assert isinstance(scattered, Placement)
    assert scattered.numa_nodes == (0, 1)
    room = make_room(machine, occupants, Request(4, PinningOptions(scope=Scope.ANY)))
    assert room is not None
    assert len(room.moves) == 1
    assert len(room.placement.numa_nodes) == 1


def test_a_full_numa_node_is_cleared_on_a_machine_of_256_cpus() -> None:
    occupants: list[Occupant] = []
    for number in range(200):
        size = (8, 4, 12, 4)[number % 4]
        node = ROME.numa_nodes[number % 8]
        request = Request(size, PinningOptions(scope=Scope.ONE_NUMA, smt=Smt.REQUIRE), memory=size * GIB)
        now = RunningVms(ROME, occupants, None).free({})
        found = place(ROME, within(now, node.cpus), request)
        if isinstance(found, Placement) and now.cpus.bit_count() > 52:
            occupants.append(Occupant(f"vm-{number}", request, found))
    request = Request(20, PinningOptions(scope=Scope.ONE_NUMA, smt=Smt.REQUIRE), memory=20 * GIB)
    room = make_room(ROME, occupants, request)
    assert room is not None
    assert 0 < len(room.moves) <= 3
    _check(ROME, occupants, request, room)


@settings(suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_step_is_safe_and_no_vm_loses_by_it(data: st.DataObject) -> None:
    topology = data.draw(topologies(most_cpus=24))
    occupants = data.draw(occupied(topology, requests(most_vcpus=4), least=2, most=10))
    free = RunningVms(topology, occupants, None).free({})
    request = data.draw(requests(most_vcpus=max(1, free.cpus.bit_count())))
    room = make_room(topology, occupants, request, most_moves=2)
    assert room == make_room(topology, occupants, request, most_moves=2)
    if room is not None:
        _check(topology, occupants, request, room)


def _check(topology: Topology, occupants: Sequence[Occupant], request: Request, room: Room) -> None:
    """Take the moves one by one: each only with what is free at that moment."""
    running_vms = RunningVms(topology, occupants, None)
    now: dict[str, Placement | None] = {}
    for move in room.moves:
        one = running_vms.occupants[move.id]
        assert one.request.options.policy is not Policy.IMMOVABLE
        assert move.before == (now.get(move.id) or one.placement)
        free = running_vms.free({**now, move.id: None})
        if one.request.owns_cpus:
            assert not move.after.owned & ~free.cpus
        else:
            assert not move.after.cpus & ~free.pool
        # Whole cores: a sharing VM with one vCPU for each names the threads that it runs on alone.
        cores = {topology.core_of[cpu] for cpu in cpus_of(move.after.cpus | move.after.owned)}
        if one.request.options.smt is Smt.PREFER:
            cores = {move.after.cpus | move.after.owned}
        again = place(topology, within(free, sum(cores)), one.request)
        assert isinstance(again, Placement)
        assert (again.numa_nodes, again.memory) == (move.after.numa_nodes, move.after.memory)
        assert locality_of(topology, move.after) <= locality_of(topology, one.placement)
        now[move.id] = move.after
    assert place(topology, running_vms.free(now), request) == room.placement
    empty = place(topology, free_of(topology, Ledger()), request)
    assert isinstance(empty, Placement)
    assert len(room.placement.numa_nodes) <= len(empty.numa_nodes)
