"""The cheapest VM that may leave its node does so, where the waiting VM then fits and it fits elsewhere."""

from __future__ import annotations

from random import Random

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cluster.room_in_cluster import MOST_VMS, MigratableVm, RoomByMigration, find_migration
from kvplace.core.cluster.victims import OccupiedMachine
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.request import Request, Scope
from kvplace.core.scalars import NodeName, PodUid
from tests.core.claims import with_vm
from tests.core.requests import request_with
from tests.nodes.machines import TWO

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
