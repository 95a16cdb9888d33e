"""Defragmentation: each move is possible and worth it, and few orders of moves gain more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from random import Random

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.defragmentation import (
    MOST_PLACEMENTS,
    Defragmentation,
    DefragmentingMove,
    better_placement,
    cpus_in_places,
    defragment,
    left_by,
)
from kvplace.core.cluster.draft import OPEN, ClosedNodes
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Reason, Refusal
from kvplace.core.request import Level, PinningOptions, Policy, Request, Scope
from kvplace.core.scalars import CpuMask, NodeName, NumaId, ResourceName
from tests.core.cluster.clusters import check_sound, machine, nodes_of, problems
from tests.profiles import rounds


def _vm(node: ClusterNode, name: str, cpus: Sequence[int]) -> ClusterNode:
    """Add a VM on exactly these CPUs."""
    request = Request(len(cpus), PinningOptions(Scope.ANY))
    placement = try_place(node.topology, node.free.within(CpuMask(mask_of(cpus))), request)
    assert placement is not None
    return replace(node, running=(*node.running, Occupant(name, request, placement)))


def _ids(nodes: Sequence[ClusterNode]) -> list[str]:
    return [vm.id for node in nodes for vm in node.running]


def _everywhere(nodes: Sequence[ClusterNode]) -> Mapping[str, ClosedNodes]:
    return dict.fromkeys(_ids(nodes), OPEN)


def _played(nodes: Sequence[ClusterNode], moves: Sequence[DefragmentingMove]) -> list[ClusterNode]:
    """Make the moves one after the other, and check each."""
    now = {node.name: node for node in nodes}
    for move in moves:
        before = _places(now.values())
        source = now[move.node]
        vm = next(one for one in source.running if one.id == move.id)
        assert vm.placement == move.before
        others = tuple(one for one in source.running if one is not vm)
        if not move.is_migration:
            assert not move.after.owned & ~vm.placement.owned & ~source.free.cpus
        now[source.name] = replace(source, running=others)
        after = now[move.target] = _with(now[move.target], replace(vm, placement=move.after))
        check_sound(after, after.running)
        gained = _places(now.values()) - before
        assert gained == move.cpus_gained
        assert move.comes_together or gained >= vm.request.vcpus
    return list(now.values())


def _with(node: ClusterNode, vm: Occupant) -> ClusterNode:
    return replace(node, running=(*node.running, vm))


def _places(nodes: Iterable[ClusterNode]) -> int:
    return sum(cpus_in_places(node.topology, node.free.cpus) for node in nodes)


def test_every_move_is_possible_when_its_turn_comes_and_is_worth_it() -> None:
    inside = between = 0
    for problem in problems(rounds(300, 30)):
        found = defragment(problem.nodes, _ids(problem.nodes), _everywhere(problem.nodes))
        after = _played(problem.nodes, found.moves)
        assert defragment(after, (), {}).before == found.after
        assert len({move.id for move in found.moves}) == len(found.moves)
        kinds = [move.is_migration for move in found.moves]
        assert kinds == sorted(kinds)
        inside += kinds.count(False)
        between += kinds.count(True)
    assert inside > rounds(20, 2)
    assert between > rounds(20, 2)


def test_vms_without_consent_with_devices_or_of_other_policies_stay() -> None:
    for problem in problems(rounds(100, 10)):
        ids = _ids(problem.nodes)
        assert defragment(problem.nodes, (), {}).moves == ()
        found = defragment(problem.nodes, ids[::2], dict.fromkeys(ids[1::2], OPEN))
        assert all((move.id in ids[1::2]) == move.is_migration for move in found.moves)
        policies = {vm.id: vm.request.options.policy for node in problem.nodes for vm in node.running}
        assert all(policies[move.id] in (Policy.EXCLUSIVE, Policy.SHARE) for move in found.moves)
    node = _vm(nodes_of(machine(4, 4))[0], "split", (0, 1, 4, 5))
    assert [move.id for move in defragment([node], ["split"], {}).moves] == ["split"]
    vm = node.running[0]
    for has in ({"devices": {ResourceName("intel.com/vf"): 1}}, {"device_nodes": frozenset([NumaId(0)])}):
        device = replace(vm, request=replace(vm.request, **has))
        assert defragment([replace(node, running=(device,))], ["split"], {}).moves == ()


def _best_of_all_orders(node: ClusterNode) -> tuple[int, int]:
    """Let every sequence of VMs get better cores, each if that is worth it, and take the best result."""
    best = (0, 0)
    for count in range(1, len(node.running) + 1):
        for order in permutations([vm.id for vm in node.running], count):
            now, together, gained = node, 0, 0
            for name in order:
                vm = next(one for one in now.running if one.id == name)
                others = replace(now, running=tuple(one for one in now.running if one is not vm))
                after = better_placement(now.topology, others.free, vm.request, vm.placement)
                if after is None:
                    break
                more = cpus_in_places(now.topology, left_by(others.free, after))
                more -= cpus_in_places(now.topology, now.free.cpus)
                comes = len(after.numa_nodes) < len(vm.placement.numa_nodes)
                if not comes and more < vm.request.vcpus:
                    break
                together, gained = together + comes, gained + more
                now = _with(others, replace(vm, placement=after))
                best = max(best, (together, gained))
    return best


def _scattered(chance: Random) -> ClusterNode:
    """Draw a machine with VMs on CPUs that were chosen without any rule."""
    node = nodes_of(machine(*(chance.randint(4, 8) for _ in range(chance.randint(2, 3)))))[0]
    for number in range(5):
        free = list(cpus_of(node.free.cpus))
        size = chance.choice((1, 2, 2, 3, 4))
        if len(free) - size < 4:
            break
        node = _vm(node, f"vm-{number}", chance.sample(free, size))
    return node


def test_moves_inside_a_node_gain_as_much_as_the_best_order_of_all_in_nine_of_ten_cases() -> None:
    chance = Random(5)
    tried = equal = 0
    for _ in range(rounds(200, 20)):
        node = _scattered(chance)
        best = _best_of_all_orders(node)
        moves = defragment([node], _ids([node]), {}).moves
        found = (sum(move.comes_together for move in moves), sum(move.cpus_gained for move in moves))
        assert found <= best
        tried += best != (0, 0)
        equal += best != (0, 0) and found == best
    assert tried >= rounds(150, 10)
    assert equal >= 0.9 * tried


def test_no_single_move_is_left_that_is_worth_it() -> None:
    for problem in problems(rounds(150, 15)):
        found = defragment(problem.nodes, _ids(problem.nodes), {})
        after = _played(problem.nodes, found.moves)
        moved = {move.id for move in found.moves}
        again = defragment(after, [name for name in _ids(after) if name not in moved], {})
        assert again.moves == ()


def test_a_migration_empties_a_numa_node_for_a_large_vm() -> None:
    first, second = nodes_of(machine(16), machine(16))
    nodes = [_vm(first, "a", range(2)), _vm(second, "b", range(10))]
    found = defragment(nodes, (), {"a": OPEN})
    assert [(move.id, move.node, move.target) for move in found.moves] == [("a", "node-0", "node-1")]
    assert (found.before.places[16], found.after.places[16]) == (0, 1)
    assert (found.before.largest[Level.NUMA], found.after.largest[Level.NUMA]) == (14, 16)
    closed = {NodeName("node-1"): Refusal(Reason.NODE_FILTERED, "cordoned", {}, never=True)}
    assert defragment(nodes, (), {"a": closed}).moves == ()


def test_a_vm_that_no_machine_holds_together_stays_split_and_counts_as_not_split() -> None:
    node = _vm(nodes_of(machine(4, 4))[0], "large", range(6))
    found = defragment([node], ["large"], {})
    assert found.before.split == 0
    assert found.moves == ()


def test_a_vm_counts_as_split_only_where_the_cpus_that_its_node_gives_out_hold_it_together() -> None:
    whole, narrow = nodes_of(machine(4, 4), machine(4, 4))
    narrow = replace(narrow, topology=narrow.topology.giving_out(CpuMask(0b0111_0111)))
    nodes = [_vm(node, f"vm-{node.name}", (0, 1, 4, 5)) for node in (whole, narrow)]
    assert {node.topology.fingerprint for node in nodes} == {whole.topology.fingerprint}
    for order in (nodes, nodes[::-1]):
        assert defragment(order, (), {}).before.split == 1


def test_the_search_ends_at_its_bound_and_reports_that() -> None:
    nodes = [_vm(node, f"vm-{node.name}", (0, 1, 4, 5)) for node in nodes_of(*[machine(4, 4)] * 3)]
    found = defragment(nodes, _ids(nodes), {}, most_placements=1)
    assert not found.complete
    assert len(found.moves) == 1
    whole = defragment(nodes, _ids(nodes), {}, most_placements=MOST_PLACEMENTS)
    assert whole.complete
    assert len(whole.moves) == 3
    assert whole.before.split == 3
    assert whole.after.split == 0


def test_a_search_that_is_interrupted_returns_the_moves_so_far() -> None:
    nodes = [_vm(node, f"vm-{node.name}", (0, 1, 4, 5)) for node in nodes_of(*[machine(4, 4)] * 3)]
    found: Defragmentation = defragment(nodes, _ids(nodes), {}, watch=lambda count: count < 2)
    assert not found.complete
    assert len(found.moves) == 2
