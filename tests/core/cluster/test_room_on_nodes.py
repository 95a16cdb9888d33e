"""The node is chosen where the fewest and cheapest moves make room, and only VMs that may move do."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.room_in_cluster import MOST_NODES, find_room
from kvplace.core.ledger import claim_of
from kvplace.core.moves.make_room import MovePlan, make_room
from kvplace.core.occupant import ClusterNode, Occupant, RunningVms, occupant_of_claim
from kvplace.core.scalars import NodeName, PodUid
from tests.core.moves.fragmented import MIXED, Case, fragmented
from tests.effort import rounds


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
        running = RunningVms(case.topology, case.occupants, None)
        for move in room.plan.moves:
            assert running.occupants[move.id].movable
            others = [one for one in running.occupants.values() if one.id != move.id]
            free = RunningVms(case.topology, others, None).free({})
            assert free.can_give(claim_of(PodUid(move.id), move.after))
            moved = Occupant(move.id, running.occupants[move.id].request, move.after)
            running = RunningVms(case.topology, [*others, replace(moved, movable=True)], None)
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
            plan = make_room(node.topology, node.running, case.request)
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
