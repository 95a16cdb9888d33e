"""What one VM takes is gone once, not twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import mask_of
from kvplace.core.free import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.request import PinningOptions, Policy, Request, Scope
from kvplace.core.scalars import Bytes, CpuMask, NumaId, PackageId
from kvplace.core.topology import Topology, topology_of_cpu_map
from kvplace.machines.shipped import read_machine
from tests.core.claims import with_vm
from tests.core.machines import subsets, topologies

GIB = Bytes(1 << 30)
PAGED = Request(8, PinningOptions(scope=Scope.ONE_NUMA), memory=20 * GIB, huge_pages={GIB: 16})


def test_huge_pages_of_a_vm_are_not_taken_from_the_other_memory_too() -> None:
    machine = read_machine("2x-xeon-6338")
    ledger = with_vm(machine, Ledger(), "paged", PAGED)
    empty = free_of(machine, Ledger())
    for free in (free_of(machine, ledger), free_of(machine, Ledger(), holds=ledger.claims.values())):
        assert dict(empty.memory)[NumaId(0)] - dict(free.memory)[NumaId(0)] == 4 * GIB
        assert free.pages_by_node == {(0, GIB): 112, (1, GIB): 128}


def test_what_is_free_is_what_may_be_given_out_less_what_is_owned_or_named() -> None:
    machine = read_machine("epyc-7502p")
    owned = with_vm(machine, Ledger(), "own", Request(4, PinningOptions(scope=Scope.ONE_L3)))
    ledger = with_vm(
        machine, owned, "share", Request(3, PinningOptions(scope=Scope.ONE_L3, policy=Policy.SHARE))
    )
    named = mask_of(ledger.shared_use)
    free = free_of(machine, ledger)
    assert free.pool == machine.allocatable & ~ledger.owned
    assert free.cpus == free.pool & ~named
    assert dict(free.uses) == ledger.shared_use


def test_a_map_of_the_node_narrows_what_is_free_and_changes_nothing_else() -> None:
    machine = read_machine("2x-xeon-6338")
    narrow = free_of(machine, Ledger(), only=CpuMask(0b1111_0000))
    assert narrow.pool == narrow.cpus == 0b1111_0000 & machine.allocatable
    assert narrow.memory == free_of(machine, Ledger()).memory


def test_a_hold_counts_like_a_claim_and_never_twice() -> None:
    machine = read_machine("2x-xeon-6338")
    ledger = with_vm(machine, Ledger(), "one", PAGED)
    holds = ledger.claims.values()
    assert free_of(machine, Ledger(), holds) == free_of(machine, ledger) == free_of(machine, ledger, holds)


def test_a_machine_that_does_not_say_how_much_memory_it_has_has_none_to_count() -> None:
    machine = topology_of_cpu_map({PackageId(0): CpuMask(0b11)})
    assert free_of(machine, Ledger()).memory == ()


@given(topologies(), st.data())
def test_equal_states_are_equal_and_can_be_remembered(machine: Topology, data: st.DataObject) -> None:
    only = data.draw(subsets(machine.cpus))
    assert hash(free_of(machine, Ledger(), only=CpuMask(only))) == hash(
        free_of(machine, Ledger({}, {}), only=CpuMask(only))
    )
