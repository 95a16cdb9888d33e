"""Many VMs planned at once: sound, never worse than one after the other, and better where room is short."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.draft import Draft, DraftNode, shapes_of
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cluster.planning import Plan, PlanProgress, PlanWatch, Stage, Tally, VmRequest, plan
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.moves.make_room import make_room
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Placement, Reason, Refusal
from kvplace.core.request import PinningOptions, Policy, Request, Scope
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from tests.core.cluster.clusters import (
    ANY_REQUEST,
    check_sound,
    machine,
    nodes_of,
    occupants_of,
    one_by_one,
    problems,
    vms_of,
)
from tests.core.machines import GIB, make_node, topologies
from tests.profiles import examples, rounds


def test_no_cpu_is_given_twice_and_every_vm_has_an_answer() -> None:
    moved = refused = 0
    for number, problem in enumerate(problems(rounds(160, quick=24))):
        found = plan(problem.nodes, problem.vms, problem.strategy, make_room=number % 4 > 0)
        for node in problem.nodes:
            check_sound(node, occupants_of(node, found, problem.vms))
        answered = [vm.id for vm in found.planned] + [vm.id for vm in found.refused]
        assert sorted(answered) == sorted(vm.id for vm in problem.vms), number
        placed = {vm.id for vm in found.planned}
        assert found.placed == Tally(
            len(placed), sum(vm.request.vcpus for vm in problem.vms if vm.id in placed)
        )
        assert number % 4 > 0 or not found.moves
        moved += bool(found.moves)
        refused += bool(found.refused)
    assert moved >= rounds(18, quick=1)
    assert refused >= rounds(60, quick=6)


def test_a_plan_places_no_less_than_one_after_the_other() -> None:
    better = better_with_moves = 0
    for number, problem in enumerate(problems(rounds(200, quick=30))):
        found = plan(problem.nodes, problem.vms, problem.strategy)
        assert found.one_by_one == one_by_one(problem.nodes, problem.vms, problem.strategy), number
        assert found.placed >= found.one_by_one, number
        with_moves = plan(problem.nodes, problem.vms, problem.strategy, make_room=True)
        assert with_moves.placed >= found.placed, number
        assert bool(with_moves.moves) == (with_moves.placed > found.placed), number
        better += found.placed > found.one_by_one
        better_with_moves += with_moves.placed > found.placed
    assert better >= rounds(15, quick=1)
    assert better_with_moves >= rounds(36, quick=3)


def test_nor_where_many_vms_compete_for_few_cpus() -> None:
    """Three nodes of 14 CPUs. All plans place 2,368 vCPUs, without exchanges 2,342."""
    better = vcpus = 0
    for seed in range(rounds(60, quick=10)):
        chance = Random(seed)
        cluster = nodes_of(*(machine(8, 6, memory=24 * GIB) for _ in range(3)))
        wanted = [
            VmRequest(
                f"vm-{number}",
                Request(
                    chance.randint(1, 8),
                    PinningOptions(scope=chance.choice(list(Scope))),
                    memory=chance.randint(0, 9) * GIB,
                ),
            )
            for number in range(chance.randint(8, 16))
        ]
        found = plan(cluster, wanted)
        assert found.one_by_one == one_by_one(cluster, wanted, Strategy.PACK), seed
        assert found.placed >= found.one_by_one, seed
        better += found.placed > found.one_by_one
        vcpus += found.placed.vcpus
        for node in cluster:
            check_sound(node, occupants_of(node, found, wanted))
    assert better >= rounds(30, quick=3)
    assert vcpus >= rounds(2360, quick=390)


def test_equal_input_gives_equal_plans() -> None:
    for problem in problems(rounds(30, quick=10)):
        first, second = (plan(problem.nodes, problem.vms, problem.strategy, make_room=True) for _ in range(2))
        assert first == second


def test_no_vm_goes_to_a_node_that_is_closed_to_it_and_its_refusal_states_why() -> None:
    placed = refused = 0
    why = Refusal(Reason.NODE_FILTERED, "the node is cordoned (spec.unschedulable)", {}, never=True)
    gone = NodeName("not in the plan")
    for number, problem in enumerate(problems(rounds(120, quick=24))):
        closed = {node.name: why for node in problem.nodes[: 1 + number % 2]} | {gone: why}
        vms = [replace(vm, closed=closed) if at % 2 else vm for at, vm in enumerate(problem.vms)]
        found = plan(problem.nodes, vms, problem.strategy, make_room=number % 3 == 0)
        closed_to = {vm.id: vm.closed for vm in vms}
        for one in found.planned:
            assert one.node not in closed_to[one.id], number
            placed += bool(closed_to[one.id])
        for vm in found.refused:
            for name in closed_to[vm.id]:
                assert vm.refusals[name] is why
            refused += bool(closed_to[vm.id])
        for node in problem.nodes:
            check_sound(node, occupants_of(node, found, vms))
    assert placed >= rounds(30, quick=4)
    assert refused >= rounds(50, quick=6)


@pytest.mark.parametrize("make_room", [False, True])
def test_a_plan_without_nodes_refuses_everything(make_room: bool) -> None:
    found = plan((), [VmRequest("a", Request(2))], make_room=make_room)
    assert [vm.id for vm in found.refused] == ["a"]


def test_a_refused_vm_fits_nowhere_beside_the_others_and_every_node_has_its_refusal() -> None:
    refused = 0
    for problem in problems(rounds(100, quick=20)):
        found = plan(problem.nodes, problem.vms)
        for vm in found.refused:
            refused += 1
            assert set(vm.refusals) == {node.name for node in problem.nodes}
            for node in problem.nodes:
                claims = [
                    claim_of(PodUid(one.id), one.placement) for one in occupants_of(node, found, problem.vms)
                ]
                free = free_of(node.topology, Ledger(), claims)
                assert place(node.topology, free, vm.request) == vm.refusals[node.name]
    assert refused >= rounds(100, quick=10)


@st.composite
def occupied(
    draw: st.DrawFn,
    topology: Topology,
    requests: st.SearchStrategy[Request],
    *,
    least: int = 0,
    most: int = 5,
) -> list[Occupant]:
    """VMs that run on a machine, each put where it happened to fit at its time."""
    chance = Random(draw(st.integers(0, 1 << 32)))
    occupants: list[Occupant] = []
    for number, request in enumerate(draw(st.lists(requests, min_size=least, max_size=most))):
        free = make_node(topology, occupants).free
        cpus = list(cpus_of(free.pool))
        some = mask_of(chance.sample(cpus, chance.randint(0, len(cpus))))
        for choice in (free.within(some), free):
            found = place(topology, choice, request)
            if isinstance(found, Placement):
                occupants.append(Occupant(f"vm-{number}", request, found))
                break
    return [one for one in occupants if chance.random() < 0.85]


@given(st.data())
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow])
def test_the_free_cpus_of_a_draft_are_those_that_the_ledger_would_leave(data: st.DataObject) -> None:
    topology = data.draw(topologies(most_cpus=16, memory=True))
    running = tuple(data.draw(occupied(topology, ANY_REQUEST, most=3)))
    shrinks = data.draw(st.booleans())
    draft = Draft.empty([ClusterNode(NodeName("node"), topology, running, pools_shrink=shrinks)])
    shapes = shapes_of(data.draw(st.lists(ANY_REQUEST, min_size=1, max_size=6)))
    for vm, shape in enumerate(shapes):
        answer = draft.nodes[0].place(shape)
        if answer is None:
            continue
        assert draft.nodes[0].fitting(shape)
        draft.assign(vm, shape, 0, answer)
        if data.draw(st.booleans()):
            draft.unassign(data.draw(st.sampled_from(sorted(draft.node_of))))
        planned = [claim_of(PodUid(str(number)), draft.planned(number).placement) for number in draft.node_of]
        claims = [*(claim_of(PodUid(f"running {one.id}"), one.placement) for one in running), *planned]
        assert draft.nodes[0].free == free_of(topology, Ledger(), claims, pools_shrink=shrinks)


def test_large_vms_that_come_late_find_the_room_that_small_ones_would_have_taken() -> None:
    cluster = nodes_of(machine(8, 8))
    found = plan(cluster, vms_of(3, 3, 8), Strategy.SPREAD)
    assert found.one_by_one.vms <= 3
    assert found.placed == Tally(3, 14)


def test_a_scope_domain_is_filled_with_the_vms_that_leave_nothing_over() -> None:
    # The largest first leaves gaps: 9+4+3 and 8+5+3 need both nodes full to the last CPU.
    found = plan(nodes_of(machine(16), machine(16)), vms_of(5, 4, 3, 3, 9, 8))
    assert found.placed == Tally(6, 32)


def test_where_not_all_fit_as_many_as_possible_do() -> None:
    found = plan(nodes_of(machine(8)), vms_of(8, 4, 2, 2))
    assert [vm.id for vm in found.planned] == ["vm-1", "vm-2", "vm-3"]
    assert found.one_by_one == Tally(1, 8)
    assert [vm.id for vm in found.refused] == ["vm-0"]


def test_of_as_many_vms_those_with_more_vcpus_are_placed() -> None:
    assert plan(nodes_of(machine(8)), vms_of(5, 6, 7)).placed == Tally(1, 7)


def test_vms_that_need_the_nodes_with_much_memory_get_them() -> None:
    cluster = nodes_of(machine(8, memory=8 * GIB), machine(8, memory=64 * GIB))
    wanted = [
        VmRequest("small", Request(8, PinningOptions(scope=Scope.ONE_NUMA), memory=4 * GIB)),
        VmRequest("large", Request(8, PinningOptions(scope=Scope.ONE_NUMA), memory=32 * GIB)),
    ]
    for order in (wanted, wanted[::-1]):
        found = plan(cluster, order)
        assert {vm.id: vm.node for vm in found.planned} == {"small": "node-0", "large": "node-1"}


def strewn(numa_nodes: int = 2) -> ClusterNode:
    """NUMA nodes of four CPUs, half of each taken by a VM that runs there."""
    topology = machine(*[4] * numa_nodes)
    request = Request(2, PinningOptions(scope=Scope.ONE_NUMA))
    running = []
    for number in range(numa_nodes):
        found = place(topology, free_of(topology, Ledger()).within(CpuMask(0b11 << 4 * number)), request)
        assert isinstance(found, Placement)
        running.append(Occupant(f"running-{number}", request, found))
    return ClusterNode(NodeName("node"), topology, tuple(running))


def test_running_vms_move_only_with_make_room() -> None:
    node, wanted = strewn(), vms_of(4)
    assert plan([node], wanted).placed == Tally(0, 0)
    found = plan([node], wanted, make_room=True)
    assert found.placed == Tally(1, 4)
    assert len(found.moves) == 1
    check_sound(node, occupants_of(node, found, wanted))


def test_room_is_made_for_one_vm_after_the_other() -> None:
    node, wanted = strewn(4), vms_of(4, 4, 4)
    found = plan([node], wanted, make_room=True)
    assert found.placed == Tally(2, 8)
    assert len(found.moves) == 2
    check_sound(node, occupants_of(node, found, wanted))


def test_moves_are_made_on_the_node_that_needs_the_fewest() -> None:
    """The first node has to move two VMs for a free NUMA node, the second one."""
    topology = machine(6, 6)
    request = Request(2, PinningOptions(scope=Scope.ONE_NUMA))

    def running(name: str, *sets: int) -> ClusterNode:
        found = [place(topology, free_of(topology, Ledger()).within(CpuMask(cpus)), request) for cpus in sets]
        placements = [one for one in found if isinstance(one, Placement)]
        vms = (Occupant(f"{name}/{number}", request, one) for number, one in enumerate(placements))
        return ClusterNode(NodeName(name), topology, tuple(vms))

    two = running("two", 0b11, 0b1100, 0b11 << 6)
    one = running("one", 0b11, 0b11 << 6, 0b11 << 8)
    immovable = Request(2, PinningOptions(scope=Scope.ONE_NUMA, policy=Policy.IMMOVABLE))
    fixed = Occupant("two/2", immovable, two.running[2].placement)
    two = ClusterNode(NodeName("two"), topology, (*two.running[:2], fixed))
    found = plan([two, one], vms_of(6), make_room=True)
    assert [move.node for move in found.moves] == ["one"]
    assert found.moves_complete


def test_a_search_for_moves_that_stopped_at_its_bound_is_reported() -> None:
    node = strewn()
    with patch("kvplace.core.cluster.room_in_cluster._MAX_TOTAL_STEPS", 0):
        found = plan([node], vms_of(4), make_room=True)
    assert not found.moves
    assert not found.moves_complete
    assert plan([node], vms_of(4), make_room=True).moves_complete


def test_the_bound_counts_the_steps_for_all_vms_together() -> None:
    node = strewn(4)
    enough_for_one = make_room(node, vms_of(4)[0].request).steps
    with patch("kvplace.core.cluster.room_in_cluster._MAX_TOTAL_STEPS", enough_for_one):
        found = plan([node], vms_of(4, 4, 4), make_room=True)
    assert len(found.moves) == 1
    assert not found.moves_complete


def test_immovable_vms_do_not_move() -> None:
    node = strewn()
    fixed = tuple(
        Occupant(
            vm.id, Request(2, PinningOptions(scope=Scope.ONE_NUMA, policy=Policy.IMMOVABLE)), vm.placement
        )
        for vm in node.running
    )
    assert not plan([ClusterNode(NodeName("node"), node.topology, fixed)], vms_of(4), make_room=True).moves


@pytest.mark.parametrize("strategy", Strategy)
def test_while_everything_fits_vms_go_where_the_strategy_sends_them(strategy: Strategy) -> None:
    found = plan(nodes_of(machine(8), machine(8)), vms_of(2, 2), strategy)
    used = {vm.node for vm in found.planned}
    assert len(used) == (2 if strategy is Strategy.SPREAD else 1)


def ended_after(steps: int, seen: list[PlanProgress]) -> PlanWatch:
    """A watcher that notes the reports, and ends the search after so many steps."""

    def watch(at: PlanProgress) -> bool:
        seen.append(at)
        return len(seen) <= steps

    return watch


def test_a_search_that_is_stopped_anywhere_gives_a_sound_plan_and_an_answer_for_every_vm() -> None:
    undecided = 0
    for number, problem in enumerate(problems(rounds(80, quick=20))):
        watch = ended_after(number % 5 if number % 2 else number, [])
        found = plan(problem.nodes, problem.vms, problem.strategy, make_room=number % 3 > 0, watch=watch)
        for node in problem.nodes:
            check_sound(node, occupants_of(node, found, problem.vms))
        left = [vm.id for vm in found.undecided]
        answered = left + [vm.id for vm in found.planned] + [vm.id for vm in found.refused]
        assert sorted(answered) == sorted(vm.id for vm in problem.vms)
        assert found.stopped or not left
        undecided += bool(left)
    assert undecided >= rounds(5, quick=1)


def test_who_watches_a_search_is_informed_how_far_it_is_and_changes_nothing() -> None:
    for problem in problems(rounds(30, quick=10)):
        seen: list[PlanProgress] = []
        watched = plan(problem.nodes, problem.vms, problem.strategy, watch=ended_after(1_000_000, seen))
        assert watched == plan(problem.nodes, problem.vms, problem.strategy)
        assert all(at.assigned <= at.vms == len(problem.vms) for at in seen)
        assert seen[0].stage is Stage.ONE_BY_ONE


def test_a_plan_without_vms_is_empty() -> None:
    assert plan(nodes_of(machine(4)), []) == Plan((), (), (), Tally(0, 0), Tally(0, 0))


def test_copies_of_a_draft_are_independent() -> None:
    draft = Draft.empty(nodes_of(machine(4)))
    (shape,) = shapes_of([Request(2)])
    kept = draft.copy()
    answer = draft.nodes[0].place(shape)
    assert answer is not None
    draft.assign(0, shape, 0, answer)
    assert (kept.node_of, draft.node_of) == ({}, {0: 0})
    assert isinstance(kept.nodes[0], DraftNode)
    assert kept.nodes[0].free.cpus == 0b1111
    kept.become(draft)
    assert kept.planned(0).placement == answer
    assert kept.waiting(2) == [1]
