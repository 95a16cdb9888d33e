"""What one VM takes is gone once, not twice."""

from __future__ import annotations

from kvplace.core.free import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.request import Request, Scope
from kvplace.simulate.machine_files import read_machine
from tests.core.claims import with_vm

GIB = 1 << 30
PAGED = Request(8, scope=Scope.ONE_NUMA, memory=20 * GIB, huge_pages={GIB: 16})


def test_huge_pages_of_a_vm_are_not_taken_from_the_other_memory_too() -> None:
    machine = read_machine("2x-xeon-6338")
    ledger = with_vm(machine, Ledger(), "paged", PAGED)
    empty = free_of(machine, Ledger())
    for free in (free_of(machine, ledger), free_of(machine, Ledger(), holds=ledger.claims.values())):
        assert empty.memory_by_node[0] - free.memory_by_node[0] == 4 * GIB
        assert free.pages_by_node == {(0, GIB): 112, (1, GIB): 128}
