"""Making room: the cheapest VMs move, in safe steps, and no VM gets a worse placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.planning import VmRequest
from kvplace.core.cluster.planning import plan as plan_of_cluster
from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.moves.make_room import MovePlan, NoMoves, make_room
from kvplace.core.moves.suggestions import find_suggestions
from kvplace.core.occupant import (
    ClusterNode,
    Occupant,
    RunningVms,
    locality_of,
    occupant_of_claim,
)
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import CpuMask, NodeName, PodUid, ResourceName
from kvplace.core.topology import Topology
from kvplace.machines.server_types import read_machine
from tests.core.machines import GIB, make_node, make_numa_node, make_package, make_topology
from tests.core.moves.fragmented import MIXED, PLAIN, fragmented
from tests.core.requests import request_with
from tests.profiles import rounds

ROME = read_machine("2x-epyc-7763-nps4")


def _machine(nodes: int, width: int, memory: int = 0, pages: int = 0) -> Topology:
    each = [mask_of(range(node * width, (node + 1) * width)) for node in range(nodes)]
    return make_topology(
        packages=(make_package(0, mask_of(range(nodes * width))),),
        numa_nodes=tuple(
            make_numa_node(number, cpus, memory, {GIB: pages} if pages else {})
            for number, cpus in enumerate(each)
        ),
        l3_groups=tuple(each),
        cores=tuple(1 << cpu for cpu in range(nodes * width)),
    )


def _runs(topology: Topology, uid: str, cpus: str, **wish: Any) -> Occupant:
    mask = parse_cpu_list(cpus)
    request = request_with(**{"vcpus": mask.bit_count(), "scope": Scope.ONE_NUMA, **wish})
    free = free_of(topology, Ledger())
    found = place(topology, free.within(mask), request)
    assert isinstance(found, Placement)
    return Occupant(uid, request, found)


def _with_device(vm: Occupant) -> Occupant:
    return replace(vm, request=replace(vm.request, devices={ResourceName("intel.com/vf"): 1}))


def _found(topology: Topology, occupants: Sequence[Occupant], request: Request) -> MovePlan:
    found = make_room(make_node(topology, occupants), request)
    assert isinstance(found, MovePlan)
    return found


def _moves(plan: MovePlan) -> list[tuple[str, int, int]]:
    return [(move.id, move.before.cpus, move.after.cpus) for move in plan.moves]


def test_the_vm_with_the_least_memory_goes() -> None:
    machine = _machine(2, 6, memory=64 * GIB)
    occupants = [
        _runs(machine, "heavy", "0-1", memory=32 * GIB),
        _runs(machine, "light", "2-3", memory=2 * GIB),
        _runs(machine, "other", "6-9", memory=8 * GIB),
    ]
    plan = _found(machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_NUMA), memory=GIB))
    assert _moves(plan) == [("light", 0b1100, 0b11 << 10)]
    assert plan.bytes_moved == 2 * GIB


def _beside_a_pool(machine: Topology) -> list[Occupant]:
    """Seven CPUs of the first of two NUMA nodes get free if its pool shrinks and "moves" leaves."""
    pool = _runs(machine, "pool", "4-7", policy=Policy.NUMA)
    return [
        _runs(machine, "moves", "0-3"),
        replace(pool, placement=replace(pool.placement, cpus=mask_of(range(4, 8)))),
        replace(_runs(machine, "stays", "8-11"), movable=False),
    ]


WIDE = Request(7, PinningOptions(scope=Scope.ONE_NUMA))


@pytest.mark.parametrize("kind", ["a VM", "a claim alone"])
def test_a_vm_goes_to_cpus_of_a_pool_that_an_agent_can_shrink(kind: str) -> None:
    machine = _machine(2, 8)
    moves, pool, stays = _beside_a_pool(machine)
    if kind == "a claim alone":
        pool = occupant_of_claim("pool", claim_of(PodUid("pool"), pool.placement), machine)
    occupants = [moves, pool, stays]
    assert isinstance(make_room(make_node(machine, occupants), WIDE), NoMoves)
    plan = make_room(make_node(machine, occupants, pools_shrink=True), WIDE)
    assert isinstance(plan, MovePlan)
    assert _moves(plan) == [("moves", mask_of(range(4)), mask_of(range(12, 16)))]
    assert plan.placement.owned == mask_of(range(7))  # the pool keeps its last core


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_move_is_suggested_with_cpus_of_a_pool_only_where_an_agent_can_shrink_it(*, shrinks: bool) -> None:
    machine = _machine(2, 8)
    occupants = _beside_a_pool(machine)
    free = make_node(machine, occupants, pools_shrink=shrinks).free
    found = find_suggestions(make_node(machine, occupants, pools_shrink=shrinks), free, WIDE).found
    suggested = [(move.id, one.placement.owned) for one in found for move in one.moves]
    assert suggested == ([("moves", mask_of(range(7)))] if shrinks else [])


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_plan_makes_room_in_a_pool_only_where_an_agent_can_shrink_it(*, shrinks: bool) -> None:
    machine = _machine(2, 8)
    node = ClusterNode(NodeName("node"), machine, tuple(_beside_a_pool(machine)), pools_shrink=shrinks)
    found = plan_of_cluster([node], [VmRequest("wide", WIDE)], make_room=True)
    assert [one.move.id for one in found.moves] == (["moves"] if shrinks else [])
    assert [one.placement.owned for one in found.planned] == ([mask_of(range(7))] if shrinks else [])


def test_a_vm_with_devices_of_the_host_stays_on_its_numa_node() -> None:
    machine = _machine(2, 6, memory=64 * GIB)
    occupants = [
        _runs(machine, "heavy", "0-1", memory=32 * GIB),
        _with_device(_runs(machine, "light", "2-3", memory=2 * GIB)),
        _runs(machine, "other", "6-9", memory=8 * GIB),
    ]
    request = Request(4, PinningOptions(scope=Scope.ONE_NUMA), memory=GIB)
    assert _moves(_found(machine, occupants, request)) == [("heavy", 0b11, 0b11 << 10)]
    pinned = [_with_device(one) for one in occupants]
    assert isinstance(make_room(make_node(machine, pinned), request), NoMoves)


def test_a_vm_with_devices_of_the_host_gets_other_cores_of_its_numa_node() -> None:
    machine = make_topology(
        packages=(make_package(0, mask_of(range(8))),),
        numa_nodes=(make_numa_node(0, mask_of(range(8)), 16 * GIB),),
        l3_groups=(0b1111, 0b1111 << 4),
        cores=tuple(1 << cpu for cpu in range(8)),
    )
    occupants = [
        _with_device(_runs(machine, "a", "0-1", memory=GIB)),
        _with_device(_runs(machine, "b", "4-5", memory=GIB)),
    ]
    plan = _found(machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_L3)))
    assert len(plan.moves) == 1


def test_a_move_inside_a_numa_node_costs_nothing_and_is_preferred() -> None:
    machine = make_topology(
        packages=(make_package(0, mask_of(range(16))),),
        numa_nodes=(
            make_numa_node(0, mask_of(range(8)), 16 * GIB),
            make_numa_node(1, mask_of(range(8, 16)), 16 * GIB),
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
    plan = _found(machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_L3)))
    assert len(plan.moves) == 1
    assert plan.bytes_moved == 0


def test_a_vm_over_two_numa_nodes_changes_cpus_on_one_of_them_rather_than_take_its_memory_along() -> None:
    machine = _machine(2, 6, memory=16 * GIB)
    wide = Request(3, PinningOptions(scope=Scope.ANY, policy=Policy.SHARE), memory=3 * GIB)
    lies = place(machine, free_of(machine, Ledger()).within(parse_cpu_list("2,5,11")), wide)
    assert isinstance(lies, Placement)
    occupants = [
        Occupant("wide", wide, lies),
        _runs(machine, "full", "0-1,3"),
        _runs(machine, "shares", "7-9", policy=Policy.SHARE),
    ]
    plan = _found(machine, occupants, Request(3, PinningOptions(scope=Scope.ONE_NUMA)))
    assert [(move.id, move.bytes_moved, move.after.numa_nodes) for move in plan.moves] == [
        ("wide", 0, (0, 1))
    ]
    assert plan.placement.cpus == parse_cpu_list("6,10-11")


def test_memory_and_huge_pages_must_fit_where_a_vm_goes() -> None:
    machine = _machine(3, 4, memory=8 * GIB, pages=4)
    paged = {"memory": 3 * GIB, "huge_pages": {GIB: 3}}
    occupants = [
        _runs(machine, "a", "0-1", **paged),
        _runs(machine, "b", "4-5", **paged),
        _runs(machine, "c", "8-9", memory=GIB),
    ]
    plan = _found(machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_NUMA)))
    assert _moves(plan) == [("c", 0b11 << 8, 0b11 << 2)]
    occupants[2] = _runs(machine, "c", "8-9", **paged)
    request = Request(4, PinningOptions(scope=Scope.ONE_NUMA))
    assert isinstance(make_room(make_node(machine, occupants), request), NoMoves)


def test_an_isolated_vm_goes_where_it_leaves_fewer_siblings_idle() -> None:
    uneven = replace(_machine(1, 4), cores=(CpuMask(0b0101), CpuMask(0b0010), CpuMask(0b1000)))
    lavish = _runs(uneven, "isolated", "0-2", vcpus=2, smt=Smt.ISOLATE)
    assert lavish.placement.owned == 0b0111
    plan = _found(uneven, [lavish], Request(1, PinningOptions(emulator_threads=EmulatorThreads.ISOLATE)))
    assert _moves(plan) == [("isolated", lavish.placement.cpus, 0b1010)]


def test_a_vm_mostly_outside_the_usable_cpus_needs_no_more_of_them() -> None:
    plain = _machine(3, 4)
    uneven = replace(plain, cores=(*plain.cores[:8], mask_of([8, 11]), mask_of([9]), mask_of([10])))
    occupants = [_runs(uneven, "a", "0-1"), _runs(uneven, "b", "4-5"), _runs(uneven, "outside", "8-10")]
    request = Request(4, PinningOptions(scope=Scope.ONE_NUMA))
    plan = make_room(make_node(uneven.giving_out(parse_cpu_list("0-7,10")), occupants), request)
    assert isinstance(plan, MovePlan)
    assert len(plan.moves) == 1


def test_of_equally_cheap_moves_those_are_made_after_which_the_new_vm_has_the_best_locality() -> None:
    """Without "large" the new VM lies on two L3 groups of node 0, without "small" on one."""
    machine = replace(_machine(2, 8), l3_groups=tuple(CpuMask(0b1111 << first) for first in (0, 4, 8, 12)))
    occupants = [
        _runs(machine, "stays-0", "0-1", policy=Policy.IMMOVABLE),
        _runs(machine, "large", "2-3"),
        _runs(machine, "small", "7"),
        _runs(machine, "stays-1", "8-13", policy=Policy.IMMOVABLE),
    ]
    plan = _found(machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_NUMA)))
    assert _moves(plan) == [("small", 1 << 7, 1 << 14)]
    assert plan.placement.cpus == parse_cpu_list("4-7")


def test_equal_vms_are_distinguished_by_who_else_is_on_their_cores() -> None:
    """To move "a" frees half a core, because the rest of it is in use; to move "b" frees a whole one."""
    machine = replace(
        _machine(2, 4), cores=(CpuMask(0b11), CpuMask(0b1100), CpuMask(0b110000), CpuMask(0b11000000))
    )
    occupants = [
        _runs(machine, "a", "0"),
        _runs(machine, "b", "2"),
        *(_runs(machine, f"stays-{cpu}", f"{cpu}", policy=Policy.IMMOVABLE) for cpu in (1, 4, 6)),
    ]
    plan = _found(machine, occupants, Request(2, PinningOptions(scope=Scope.ONE_NUMA, smt=Smt.REQUIRE)))
    assert [uid for uid, _, _ in _moves(plan)] == ["b"]
    assert plan.placement.cpus == 0b1100


def test_no_vm_is_moved_onto_more_sockets_than_before() -> None:
    """NUMA node 0 spans both sockets; only with CPU 5 the VM would leave an L3 group free."""
    machine = make_topology(
        packages=(make_package(0, 0b1111), make_package(1, 0b11110000)),
        numa_nodes=(make_numa_node(0, 0b11111111, 0),),
        l3_groups=tuple(0b11 << first for first in (0, 2, 4, 6)),
        cores=tuple(1 << cpu for cpu in range(8)),
    )
    occupants = [
        _runs(machine, "one socket", "0,2-3", scope=Scope.ANY),
        _runs(machine, "b", "4", policy=Policy.IMMOVABLE),
        _runs(machine, "c", "6", policy=Policy.IMMOVABLE),
    ]
    request = Request(2, PinningOptions(scope=Scope.ONE_L3))
    assert isinstance(make_room(make_node(machine, occupants), request), NoMoves)
    both_sockets = [_runs(machine, "both sockets", "0,2,5", scope=Scope.ANY), *occupants[1:]]
    assert len(_found(machine, both_sockets, request).moves) == 1


def test_immovable_vms_stay() -> None:
    machine = _machine(2, 4)
    request = Request(4, PinningOptions(scope=Scope.ONE_NUMA))
    moved = [_runs(machine, "a", "0-1"), _runs(machine, "b", "4-5")]
    assert [uid for uid, _, _ in _moves(_found(machine, moved, request))] == ["a"]
    moved[0] = _runs(machine, "a", "0-1", policy=Policy.IMMOVABLE)
    assert [uid for uid, _, _ in _moves(_found(machine, moved, request))] == ["b"]
    moved[1] = _runs(machine, "b", "4-5", policy=Policy.IMMOVABLE)
    assert make_room(make_node(machine, moved), request) == NoMoves(
        "no sequence of up to 2 moves makes room", exact=True
    )


def test_a_vm_moves_to_cpus_that_another_one_leaves_before() -> None:
    machine = _machine(3, 4)
    occupants = [
        _runs(machine, "large", "0-2"),
        _runs(machine, "small", "4-5"),
        _runs(machine, "rest-1", "6", policy=Policy.IMMOVABLE),
        _runs(machine, "rest-2", "8-9", policy=Policy.IMMOVABLE),
    ]
    plan = _found(machine, occupants, Request(4, PinningOptions(scope=Scope.ONE_NUMA)))
    assert _moves(plan) == [("small", 0b11 << 4, 0b11 << 10), ("large", 0b111, 0b1011 << 4)]


def test_a_vm_that_fits_well_needs_no_moves_and_one_that_never_fits_gets_none() -> None:
    machine = _machine(2, 4)
    occupants = [_runs(machine, "a", "0-1")]
    assert _found(machine, occupants, Request(2, PinningOptions(scope=Scope.ONE_NUMA))).moves == ()
    never = NoMoves("the VM does not fit on the empty machine", exact=True)
    assert make_room(make_node(machine, occupants), Request(5, PinningOptions(scope=Scope.ONE_NUMA))) == never
    full = make_room(make_node(machine, occupants), Request(7, PinningOptions(scope=Scope.ANY)))
    assert full == NoMoves("no sequence of up to 2 moves makes room", exact=True)


def test_a_vm_that_fits_on_too_many_numa_nodes_gets_moves() -> None:
    machine = _machine(2, 4)
    occupants = [_runs(machine, "a", "0-1"), _runs(machine, "b", "4-5")]
    request = Request(4, PinningOptions(scope=Scope.ANY))
    scattered = place(machine, make_node(machine, occupants).free, request)
    assert isinstance(scattered, Placement)
    assert scattered.numa_nodes == (0, 1)
    plan = _found(machine, occupants, request)
    assert len(plan.moves) == 1
    assert len(plan.placement.numa_nodes) == 1


def test_an_answer_that_comes_from_the_bound_reports_it() -> None:
    machine = _machine(2, 24)
    occupants = [_runs(machine, f"{first}", f"{first}-{first + 5}") for first in (0, 12, 24, 36)]
    request = Request(24, PinningOptions(scope=Scope.ONE_NUMA))
    assert len(_found(machine, occupants, request).moves) == 2
    assert make_room(make_node(machine, occupants), request, max_steps=10) == NoMoves(
        "no moves found within 10 search steps; there may be some", exact=False
    )


def test_a_search_that_its_watch_ends_reports_it_and_takes_no_more_steps() -> None:
    machine = _machine(2, 24)
    occupants = [_runs(machine, f"{first}", f"{first}-{first + 5}") for first in (0, 12, 24, 36)]
    request = Request(24, PinningOptions(scope=Scope.ONE_NUMA))
    told: list[int] = []

    def end(steps: int) -> bool:
        told.append(steps)
        return False

    with patch("kvplace.core.search_budget._STEPS_BETWEEN_LOOKS", 10):
        ended = make_room(make_node(machine, occupants), request, watch=end)
    assert isinstance(ended, NoMoves)
    assert ended.interrupted
    assert not ended.exact
    assert ended.sentence == "no moves found before the search was interrupted; there may be some"
    assert len(told) == 1
    assert make_room(make_node(machine, occupants), request, watch=lambda steps: True) == _found(
        machine, occupants, request
    )


def test_a_full_numa_node_is_cleared_on_a_machine_of_256_cpus() -> None:
    occupants: list[Occupant] = []
    for number in range(200):
        size = (8, 4, 12, 4)[number % 4]
        node = ROME.numa_nodes[number % 8]
        request = Request(size, PinningOptions(scope=Scope.ONE_NUMA, smt=Smt.REQUIRE), memory=size * GIB)
        now = make_node(ROME, occupants).free
        found = place(ROME, now.within(node.cpus), request)
        if isinstance(found, Placement) and now.cpus.bit_count() > 52:
            occupants.append(Occupant(f"vm-{number}", request, found))
    request = Request(18, PinningOptions(scope=Scope.ONE_NUMA, smt=Smt.REQUIRE), memory=18 * GIB)
    plan = _found(ROME, occupants, request)
    assert 0 < len(plan.moves) <= 2
    _check(ROME, occupants, request, plan)


@pytest.mark.parametrize(
    ("most_cpus", "policies", "with_moves", "with_several", "with_bytes"),
    [(12, PLAIN, 110, 25, 25), (24, MIXED, 120, 25, 25)],
    ids=["exclusive VMs", "all policies"],
)
def test_every_step_is_safe_and_no_vm_loses_by_it(
    most_cpus: int, policies: Sequence[Policy], with_moves: int, with_several: int, with_bytes: int
) -> None:
    plans: list[MovePlan] = []
    for seed in range(rounds(300, quick=60)):
        case = fragmented(Random(seed), most_cpus=most_cpus, policies=policies)
        plan = make_room(case.node, case.request)
        assert plan == make_room(case.node, case.request), seed
        if isinstance(plan, MovePlan):
            _check(case.topology, case.occupants, case.request, plan)
            plans.append(plan)
    assert len(plans) >= rounds(with_moves, quick=15)
    assert sum(len(plan.moves) > 1 for plan in plans) >= rounds(with_several, quick=2)
    assert sum(plan.bytes_moved > 0 for plan in plans) >= rounds(with_bytes, quick=2)


def _check(topology: Topology, occupants: Sequence[Occupant], request: Request, plan: MovePlan) -> None:
    """Take the moves one by one: each only with what is free at that moment."""
    running = RunningVms(make_node(topology, occupants))
    now: dict[str, Placement | None] = {}
    for move in plan.moves:
        one = running.occupants[move.id]
        assert one.request.options.policy is not Policy.IMMOVABLE
        assert move.before == (now.get(move.id) or one.placement)
        free = running.free({**now, move.id: None})
        if one.request.owns_cpus:
            assert not move.after.owned & ~free.cpus
        else:
            assert not move.after.cpus & ~free.pool
        # Whole cores: a sharing VM with one vCPU for each names the threads that it runs on alone.
        cores = {topology.core_of[cpu] for cpu in cpus_of(move.after.cpus | move.after.owned)}
        if one.request.options.smt is Smt.PREFER:
            cores = {move.after.cpus | move.after.owned}
        again = place(topology, free.within(CpuMask(sum(cores))), one.request)
        assert isinstance(again, Placement)
        assert (again.numa_nodes, again.memory) == (move.after.numa_nodes, move.after.memory)
        assert locality_of(topology, move.after) <= locality_of(topology, one.placement)
        now[move.id] = move.after
    assert place(topology, running.free(now), request) == plan.placement
    empty = place(topology, free_of(topology, Ledger()), request)
    assert isinstance(empty, Placement)
    assert len(plan.placement.numa_nodes) <= len(empty.numa_nodes)
