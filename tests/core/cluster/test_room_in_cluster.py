"""Room for a waiting VM: the cheapest moves on one node, or the cheapest VM that may leave its node."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cluster.room_in_cluster import (
    MOST_NODES,
    MOST_VMS,
    MigratableVm,
    RoomByMigration,
    find_migration,
    find_room,
)
from kvplace.core.cluster.victims import OccupiedMachine
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.moves.make_room import MovePlan, make_room
from kvplace.core.occupant import ClusterNode, Occupant, RunningVms, occupant_of_claim
from kvplace.core.request import Request, Scope
from kvplace.core.scalars import NodeName, PodUid
from tests.core.example_ledgers import with_vm
from tests.core.machines import make_node
from tests.core.moves.fragmented import MIXED, Case, fragmented
from tests.core.requests import request_with
from tests.nodes.machines import TWO
from tests.profiles import rounds


def crowded(name: str, case: Case) -> ClusterNode:
    return ClusterNode(NodeName(name), case.topology, tuple(case.occupants))


def staying(case: Case, chance: Random) -> Case:
    """Let each VM consent or not."""
    return replace(case, occupants=[replace(one, movable=chance.random() < 0.6) for one in case.occupants])


def test_only_vms_that_may_move_do_and_the_vm_fits_afterwards() -> None:
    chance, found = Random(1), 0
    for _ in range(rounds(150, quick=30)):
        case = staying(fragmented(chance, most_cpus=16, policies=MIXED), chance)
        room = find_room([crowded("one", case)], case.request)
        if room is None:
            continue
        found += 1
        running = RunningVms(case.node)
        for move in room.plan.moves:
            assert running.occupants[move.id].movable
            others = [one for one in running.occupants.values() if one.id != move.id]
            free = make_node(case.topology, others).free
            assert free.can_give(claim_of(PodUid(move.id), move.after))
            moved = Occupant(move.id, running.occupants[move.id].request, move.after)
            running = RunningVms(make_node(case.topology, [*others, replace(moved, movable=True)]))
        assert try_place(case.topology, running.free({}), case.request) is not None
    assert found > rounds(20, quick=2)


def test_the_node_with_the_fewest_moves_and_least_memory_is_chosen_in_whatever_order_they_come() -> None:
    chance, compared = Random(2), 0
    for _ in range(rounds(60, quick=10)):
        case = staying(fragmented(chance, most_cpus=16), chance)
        others = [fragmented(chance, most_cpus=16) for _ in range(3)]
        cases = dict(zip("abcd", [case, *others], strict=True))
        nodes = [crowded(name, one) for name, one in cases.items()]
        costs = []
        for node in nodes:
            plan = make_room(node, case.request)
            if isinstance(plan, MovePlan) and plan.moves:
                costs.append((len(plan.moves), plan.bytes_moved))
        room = find_room(nodes, case.request)
        again = find_room(nodes[::-1], case.request)
        assert (room is None) == (again is None) == (not costs)
        if room is not None and again is not None:
            compared += 1
            assert room.cost[:2] == again.cost[:2] == min(costs)
    assert compared > rounds(20, quick=2)


def test_a_vm_of_which_only_its_claim_is_known_stays() -> None:
    chance, stayed = Random(3), 0
    for _ in range(rounds(60, quick=20)):
        case = fragmented(chance, most_cpus=16)
        if find_room([crowded("one", case)], case.request) is None:
            continue
        claims = [claim_of(PodUid(one.id), one.placement) for one in case.occupants]
        known = [occupant_of_claim(claim.uid, claim, case.topology) for claim in claims]
        nameless = replace(case, occupants=known)
        assert nameless.free == case.free
        assert find_room([crowded("one", nameless)], case.request) is None
        stayed += 1
    assert stayed > rounds(10, quick=2)


def test_nodes_beyond_the_bound_are_not_searched() -> None:
    chance = Random(4)
    cases = (fragmented(chance, most_cpus=16) for _ in range(100))
    case = next(one for one in cases if find_room([crowded("one", one)], one.request) is not None)
    stuck = replace(case, occupants=[replace(one, movable=False) for one in case.occupants])
    nodes = [crowded(f"stuck-{number}", stuck) for number in range(MOST_NODES)]
    assert find_room([*nodes[1:], crowded("last", case)], case.request) is not None
    assert find_room([*nodes, crowded("last", case)], case.request) is None


GIB = 1 << 30
Sizes = dict[str, list[int]]
"""VMs of each node by their vCPUs; the n-th VM of a node is called NODE-n, and has n GiB."""


def cluster(sizes: Sizes) -> tuple[dict[NodeName, OccupiedMachine], list[MigratableVm]]:
    machines, vms = {}, []
    for name, vcpus in sizes.items():
        ledger = Ledger()
        for number, count in enumerate(vcpus):
            request = request_with(count, memory=(number + 1) * GIB)
            ledger = with_vm(TWO, ledger, f"{name}-{number}", request)
            vms.append(MigratableVm(PodUid(f"uid-{name}-{number}"), NodeName(name), request))
        machines[NodeName(name)] = OccupiedMachine(TWO, ledger)
    return machines, vms


def found(
    machines: dict[NodeName, OccupiedMachine], vms: list[MigratableVm], waiting: Request
) -> RoomByMigration | None:
    return find_migration(machines, vms, waiting, machines.keys(), Strategy.PACK)


def test_the_vm_with_the_least_memory_leaves_of_those_whose_end_makes_room() -> None:
    machines, vms = cluster({"a": [4, 4, 4], "b": [8, 4], "c": [8]})
    assert found(machines, vms, request_with(16, scope=Scope.ANY)) is None  # two VMs would have to leave
    machines, vms = cluster({"a": [8, 4], "b": [8, 4], "c": [8, 6]})
    room = found(machines, vms, request_with(8))
    assert room is not None
    assert (room.vm.uid, room.vm.node) == ("uid-a-1", "a")
    assert room.target == "b"
    assert room.room.cpus.bit_count() == 8


def test_no_vm_leaves_where_it_fits_on_no_other_node_or_must_not_go_there() -> None:
    machines, vms = cluster({"a": [8, 4], "b": [8, 6]})
    assert found(machines, vms, request_with(8)) is None
    machines, vms = cluster({"a": [8, 4], "b": [8, 4], "c": [8, 4]})
    barred = [MigratableVm(vm.uid, vm.node, vm.request, frozenset(machines) - {"c"}) for vm in vms]
    room = found(machines, barred, request_with(8))
    assert room is not None
    assert room.target == "c"
    everywhere = [MigratableVm(vm.uid, vm.node, vm.request, frozenset(machines)) for vm in vms]
    assert found(machines, everywhere, request_with(8)) is None


def test_room_is_made_only_on_nodes_that_the_waiting_vm_may_use() -> None:
    machines, vms = cluster({"a": [8, 4], "b": [8, 4]})
    room = find_migration(machines, vms, request_with(8), {NodeName("b")}, Strategy.PACK)
    assert room is not None
    assert (room.vm.node, room.target) == ("b", "a")
    assert find_migration(machines, vms, request_with(8), set(), Strategy.PACK) is None


def test_after_the_migration_both_vms_have_their_cpus_and_equal_input_gets_equal_answers() -> None:
    chance, made = Random(4), 0
    for _ in range(80):
        sizes = {name: [chance.choice((2, 3, 4, 6)) for _ in range(3)] for name in "abc"}
        try:
            machines, vms = cluster(sizes)
        except AssertionError:  # they do not fit
            continue
        waiting = request_with(chance.choice((6, 8)))
        if any(try_place(TWO, machine.free_without(()), waiting) for machine in machines.values()):
            continue
        room = found(machines, vms, waiting)
        shuffled = chance.sample(vms, len(vms))
        assert found(dict(reversed(machines.items())), shuffled, waiting) == room
        if room is None:
            continue
        made += 1
        moved = claim_of(PodUid("moved"), room.placement)
        machines[room.target].ledger.after(LedgerChange(claims=(moved,))).check()
        left = machines[room.vm.node].ledger.after(LedgerChange(releases=(room.vm.uid,)))
        left.after(LedgerChange(claims=(claim_of(PodUid("waiting"), room.room),))).check()
        cheaper = [vm for vm in vms if (vm.request.memory, vm.uid) < (room.vm.request.memory, room.vm.uid)]
        assert found(machines, cheaper, waiting) is None
    assert made > 10


def test_many_small_vms_do_not_hide_the_larger_one_that_makes_room() -> None:
    full = {f"small-{number}": [4] * 4 for number in range(MOST_VMS + 1)}
    machines, vms = cluster({**full, "with-large": [8, 8], "target": [8]})
    nodes = [node for node in machines if node != "target"]
    room = find_migration(machines, vms, request_with(8), nodes, Strategy.PACK)
    assert room is not None
    assert (room.vm.node, room.target) == ("with-large", "target")
