"""The resources that one VM takes are gone once, not twice; free blocks are counted in each domain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.free_resources import (
    BLOCK_LEVELS,
    NOTHING_IN_USE,
    FreeBlock,
    MemoryInUse,
    Used,
    free_blocks_of,
    free_of,
    in_use,
    read_memory_in_use,
)
from kvplace.core.json_fields import Fields
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.request import Level, PinningOptions, Policy, Request, Scope
from kvplace.core.scalars import Bytes, CpuId, CpuMask, NumaId, PackageId
from kvplace.core.topology import Topology, topology_of_cpu_map
from kvplace.machines.server_types import read_machine
from tests.core.example_ledgers import claim, with_vm
from tests.core.machines import GIB, make_numa_node, make_package, make_topology, subsets, topologies
from tests.nodes.machines import TWO

PAGED = Request(8, PinningOptions(scope=Scope.ONE_NUMA), memory=20 * GIB, huge_pages={GIB: 16})


def test_huge_pages_of_a_vm_are_not_taken_from_the_other_memory_too() -> None:
    machine = read_machine("2x-xeon-6338")
    ledger = with_vm(machine, Ledger(), "paged", PAGED)
    empty = free_of(machine, Ledger())
    for free in (free_of(machine, ledger), free_of(machine, Ledger(), holds=ledger.claims.values())):
        assert dict(empty.memory)[NumaId(0)] - dict(free.memory)[NumaId(0)] == 4 * GIB
        assert free.pages_by_node == {(0, GIB): 112, (1, GIB): 128}


def test_free_cpus_are_the_available_ones_less_owned_and_named_ones() -> None:
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


def test_a_map_of_the_node_narrows_the_free_cpus_and_changes_nothing_else() -> None:
    machine = read_machine("2x-xeon-6338")
    narrow = free_of(machine, Ledger()).within(CpuMask(0b1111_0000))
    assert narrow.pool == narrow.cpus == 0b1111_0000 & machine.allocatable
    assert narrow.memory == free_of(machine, Ledger()).memory


def test_a_hold_counts_like_a_claim_and_never_twice() -> None:
    machine = read_machine("2x-xeon-6338")
    ledger = with_vm(machine, Ledger(), "one", PAGED)
    holds = ledger.claims.values()
    assert free_of(machine, Ledger(), holds) == free_of(machine, ledger) == free_of(machine, ledger, holds)


def test_a_machine_that_does_not_state_how_much_memory_it_has_has_none_to_count() -> None:
    machine = topology_of_cpu_map({PackageId(0): CpuMask(0b11)})
    assert free_of(machine, Ledger()).memory == ()


@given(topologies(), st.data())
def test_equal_states_are_equal_and_can_be_remembered(machine: Topology, data: st.DataObject) -> None:
    only = data.draw(subsets(machine.cpus))
    assert hash(free_of(machine, Ledger()).within(CpuMask(only))) == hash(
        free_of(machine, Ledger({}, {})).within(CpuMask(only))
    )


@given(topologies(), st.data())
def test_with_an_agent_exclusive_vms_may_take_all_of_a_numa_pool_but_one_core_of_each_node(
    topology: Topology, data: st.DataObject
) -> None:
    assume(topology.allocatable)
    asked = Request(1, PinningOptions(scope=Scope.ANY, policy=Policy.NUMA))
    ledger = with_vm(topology, Ledger(), "pool", asked)
    (pool,) = ledger.numa_pools
    for _ in range(4):
        free = free_of(topology, ledger, pools_shrink=True)
        left = pool & ~ledger.owned
        for node in topology.numa_nodes:
            if here := left & node.cpus:
                kept = here & ~free.cpus
                assert kept
                assert kept & ~topology.core_of[CpuId(here.bit_length() - 1)] == 0
        taken = data.draw(subsets(free.cpus))
        if not taken:
            break
        own = claim(f"own{taken}", taken)
        ledger = ledger.after(LedgerChange(claims=(own,)))
    for node in topology.numa_nodes:
        assert bool(pool & node.cpus) == bool(pool & node.cpus & ~ledger.owned)


def test_without_an_agent_they_get_none_of_it() -> None:
    machine = read_machine("2x-xeon-6338")
    ledger = with_vm(
        machine, Ledger(), "pool", Request(4, PinningOptions(scope=Scope.ONE_NUMA, policy=Policy.NUMA))
    )
    (pool,) = ledger.numa_pools
    assert free_of(machine, ledger).cpus == machine.allocatable & ~pool


def test_an_empty_machine_has_the_free_blocks_that_its_free_cpus_can_form() -> None:
    found = free_blocks_of(TWO, TWO.allocatable)
    assert (found.allocatable, found.free) == (16, 16)
    assert found.largest == dict.fromkeys(BLOCK_LEVELS, FreeBlock(cpus=8, cores=4, possible=8))


def test_scattered_cpus_make_small_free_blocks_without_whole_cores() -> None:
    free = CpuMask(parse_cpu_list("0,1,4"))
    found = free_blocks_of(TWO, free)
    assert found.largest[Level.NUMA] == FreeBlock(cpus=2, cores=0, possible=3)


@given(machine=topologies(tangled=None), taken=st.integers(min_value=0))
def test_every_free_block_is_the_largest_of_its_kind_by_counting(machine: Topology, taken: int) -> None:
    free = machine.allocatable & ~taken
    found = free_blocks_of(machine, free)
    domains = {
        Level.SOCKET: [socket.cpus for socket in machine.sockets],
        Level.NUMA: [node.cpus for node in machine.numa_nodes],
        Level.L3: list(machine.l3_groups),
    }
    for domain, sets in domains.items():
        block = found.largest[domain]
        inside = [set(cpus_of(one & free)) for one in sets]
        assert block.cpus == max(map(len, inside))
        assert block.cpus <= block.possible <= found.free
        # A core that lies across domains counts where its lowest CPU is.
        whole = [min(cpus_of(core)) for core in machine.cores if core & free == core]
        assert block.cores == max(len(set(cpus_of(one)) & set(whole)) for one in sets)
    assert mask_of(cpus_of(free)) == free


N0, N1 = NumaId(0), NumaId(1)
TWO_MIB = Bytes(2 << 20)
TOPOLOGY = make_topology(
    [make_package(0, 0b1111)],
    [make_numa_node(0, 0b11, 64 * GIB, {TWO_MIB: 1024}), make_numa_node(1, 0b1100, 64 * GIB)],
    [0b1111],
    [0b1, 0b10, 0b100, 0b1000],
)


def used(taken: int, pages: int = 0, memory: int = 64 * GIB) -> Used:
    return Used(Bytes(memory), Bytes(taken), {TWO_MIB: (1024, pages)} if pages else {})


def test_vms_get_the_memory_that_others_leave() -> None:
    others = MemoryInUse({N0: Bytes(10 * GIB)}, {N0: {TWO_MIB: 24}})
    before, after = (free_of(TOPOLOGY, Ledger(), holds) for holds in ((), (others.claim(),)))
    assert dict(before.memory)[N0] - dict(after.memory)[N0] == 10 * GIB
    assert dict(after.memory)[N1] == 64 * GIB
    assert dict(after.pages_by_node) == {(N0, TWO_MIB): 1000}
    assert (after.cpus, after.pool, after.uses) == (before.cpus, before.pool, before.uses)


def test_one_part_at_least_is_kept_for_the_host_and_huge_pages_that_nothing_uses_are_not() -> None:
    assert in_use({N0: used(0), N1: used(1)}, NOTHING_IN_USE) == MemoryInUse(
        {N0: Bytes(2 * GIB), N1: Bytes(2 * GIB)}
    )


def test_memory_in_use_is_rounded_up() -> None:
    found = in_use({N0: used(5 * GIB, pages=17)}, NOTHING_IN_USE)
    assert found == MemoryInUse({N0: Bytes(6 * GIB)}, {N0: {TWO_MIB: 32}})


def test_small_changes_are_not_published_and_large_ones_are() -> None:
    before = MemoryInUse({N0: Bytes(6 * GIB)}, {N0: {TWO_MIB: 32}})
    for gibibytes, pages in ((6, 32), (5, 17), (3, 2)):
        assert in_use({N0: used(gibibytes * GIB, pages)}, before) == before
    assert in_use({N0: used(7 * GIB, 33)}, before) == MemoryInUse({N0: Bytes(8 * GIB)}, {N0: {TWO_MIB: 48}})
    assert in_use({N0: used(GIB, 0)}, before) == MemoryInUse({N0: Bytes(2 * GIB)})


@given(
    st.integers(1, 1 << 42),
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.integers(1, 4096),
)
def test_the_published_amount_covers_the_use_and_fits_the_node(
    memory: int, shares: list[float], total: int
) -> None:
    published = NOTHING_IN_USE
    for share in shares:
        taken, pages = int(memory * share), int(total * share)
        measured = {N0: Used(Bytes(memory), Bytes(taken), {TWO_MIB: (total, pages)})}
        published = in_use(measured, published)
        assert taken <= published.memory[N0] <= memory
        assert pages <= published.huge_pages.get(N0, {}).get(TWO_MIB, 0) <= total
        assert in_use(measured, published) == published


def test_memory_in_use_is_written_and_read_again() -> None:
    found = MemoryInUse({N0: Bytes(3 * GIB), N1: Bytes(1)}, {N0: {TWO_MIB: 3}, N1: {}})
    assert found.document()["0"] == {"memory": "3Gi", "hugePages": {"2Mi": 3}}
    assert _read(found.document()) == found
    assert _read(None) == NOTHING_IN_USE


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], r"status.inUse is \[\]; it must be an object"),
        ({"x": {}}, r"status.inUse\['x'\] is not the id of a NUMA node"),
        ({"0": 5}, "status.inUse.0 is 5; it must be an object"),
        ({"0": {"memory": "much"}}, "status.inUse.0.memory: "),
        ({"0": {"memory": "2Ei"}}, "status.inUse.0.memory: '2Ei' is more than 1Ei"),
        ({"0": {"hugePages": {"2Mi": -1}}}, "status.inUse.0.hugePages"),
    ],
)
def test_another_form_is_one_sentence_that_names_its_place(document: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        _read(document)


def _read(document: object) -> MemoryInUse:
    return read_memory_in_use(Fields({"inUse": document}, "status"), "inUse")
