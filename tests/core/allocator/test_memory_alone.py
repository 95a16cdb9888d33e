"""NUMA nodes that give a VM memory and no CPU: without a free one, or needed for their memory alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import (
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    PinningOptions,
    Policy,
    Request,
    Scope,
)
from kvplace.core.topology import Topology
from tests.core.allocator.shapes import machine, slit
from tests.core.allocator.validity import key_of_valid
from tests.core.machines import GIB

TWO_SOCKETS = machine(
    packages=["0-7", "8-15"],
    nodes=["0-7", "8-15"],
    l3=["0-7", "8-15"],
    cores=[f"{cpu}-{cpu + 1}" for cpu in range(0, 16, 2)],
    distances=slit([10, 21], [21, 10]),
    memory=[64, 64],
    pages=[4, 4],
)
SUB_NUMA = machine(
    packages=["0-7", "8-15"],
    nodes=["0-3", "4-7", "8-11", "12-15"],
    l3=["0-7", "8-15"],
    cores=[f"{cpu}-{cpu + 1}" for cpu in range(0, 16, 2)],
    distances=slit([10, 12, 21, 21], [12, 10, 21, 21], [21, 21, 10, 12], [21, 21, 12, 10]),
    memory=[32, 32, 32, 32],
)


def placed(on: Topology, free: Free, request: Request) -> Placement:
    answer = place(on, free, request)
    assert isinstance(answer, Placement), answer
    key_of_valid(on, free, request, answer)
    return answer


def everything(on: Topology, only: str | None = None) -> Free:
    free = free_of(on, Ledger())
    return free if only is None else free.within(parse_cpu_list(only))


def test_no_vcpu_goes_to_the_other_socket_because_its_memory_is_needed() -> None:
    found = placed(
        TWO_SOCKETS, everything(TWO_SOCKETS), Request(4, PinningOptions(scope=Scope.ANY), memory=80 * GIB)
    )
    assert found.packages == (0,)
    assert found.numa_nodes == (0, 1)
    assert found.memory == {0: 60 * GIB, 1: 20 * GIB}  # 4 GiB of each node are huge pages


def test_that_holds_where_both_sockets_have_one_l3_cache_in_common() -> None:
    common = replace(TWO_SOCKETS, l3_groups=(TWO_SOCKETS.cpus,))
    free = everything(common, "2-15")
    found = placed(common, free, Request(8, PinningOptions(scope=Scope.ANY), memory=80 * GIB))
    assert found.packages == (1,)


def test_vcpus_stay_on_one_numa_node_of_a_socket_whose_other_node_gives_memory() -> None:
    free = everything(SUB_NUMA, "1-15")
    found = placed(SUB_NUMA, free, Request(4, memory=40 * GIB))
    assert mask_of(found.vcpus) == parse_cpu_list("4-7")
    assert found.memory == {0: 8 * GIB, 1: 32 * GIB}


@pytest.mark.parametrize("scope", [Scope.ANY, Scope.ONE_SOCKET, Scope.SPREAD_NUMA, Scope.SPREAD_SOCKETS])
def test_a_numa_node_without_a_free_cpu_gives_memory(scope: Scope) -> None:
    free = everything(SUB_NUMA, "0-3")
    found = placed(SUB_NUMA, free, Request(4, PinningOptions(scope=scope), memory=40 * GIB))
    assert mask_of(found.vcpus) == parse_cpu_list("0-3")
    assert found.numa_nodes == found.memory_nodes == (0, 1)


def test_a_refusal_names_the_memory_of_nodes_without_free_cpus_too() -> None:
    free = everything(TWO_SOCKETS, "0-3")
    answer = place(TWO_SOCKETS, free, Request(4, PinningOptions(scope=Scope.ANY), memory=121 * GIB))
    assert isinstance(answer, Refusal)
    assert answer.message == (
        "no machine with 4 free CPUs and 121Gi of free memory, best 120Gi on the machine"
    )
    assert answer.never


def test_memory_outside_the_scope_is_not_given() -> None:
    answer = place(TWO_SOCKETS, everything(TWO_SOCKETS), Request(4, memory=80 * GIB))
    assert isinstance(answer, Refusal)
    assert "best 60Gi on socket 0" in answer.message


def test_a_vm_that_is_spread_has_vcpus_wherever_it_has_memory_if_equal_shares_allow_that() -> None:
    request = Request(4, PinningOptions(scope=Scope.SPREAD_NUMA), memory=80 * GIB)
    found = placed(TWO_SOCKETS, everything(TWO_SOCKETS), request)
    assert [(node, found.memory[node]) for node in found.numa_nodes] == [(0, 40 * GIB), (1, 40 * GIB)]
    assert found.packages == (0, 1)
    found = placed(TWO_SOCKETS, everything(TWO_SOCKETS, "0-3,8"), request)
    assert (found.packages, found.numa_nodes) == ((0,), (0, 1))


def test_memory_comes_from_the_node_with_the_fewest_free_cpus_of_those_that_are_equally_near() -> None:
    four = machine(
        packages=["0-3", "4-7", "8-11", "12-15"],
        nodes=["0-3", "4-7", "8-11", "12-15"],
        l3=["0-3", "4-7", "8-11", "12-15"],
        cores=[str(cpu) for cpu in range(16)],
        memory=[64, 64, 64, 64],
    )
    for only, node in (("0-7,12-15", 2), ("0-3,8-15", 1), ("0-10,12-15", 2)):
        request = Request(4, PinningOptions(scope=Scope.ANY), memory=70 * GIB)
        found = placed(four, everything(four, only), request)
        assert mask_of(found.vcpus) == parse_cpu_list("0-3")
        assert found.numa_nodes == (0, node)


def test_the_vcpus_lie_where_most_of_the_memory_is() -> None:
    uneven = machine(
        packages=["0-7", "8-15"],
        nodes=["0-7", "8-15"],
        l3=["0-7", "8-15"],
        cores=[str(cpu) for cpu in range(16)],
        memory=[10, 64],
    )
    found = placed(uneven, everything(uneven), Request(4, PinningOptions(scope=Scope.ANY), memory=70 * GIB))
    assert mask_of(found.vcpus) == parse_cpu_list("8-11")
    assert found.memory == {0: 6 * GIB, 1: 64 * GIB}


def test_a_guest_that_mirrors_gets_a_cell_without_vcpus_for_such_a_node() -> None:
    options = PinningOptions(scope=Scope.ANY, guest_numa=GuestNuma.MIRROR)
    found = placed(TWO_SOCKETS, everything(TWO_SOCKETS), Request(4, options, memory=80 * GIB))
    assert [(cell.node, cell.vcpus, cell.memory) for cell in found.guest_cells] == [
        (0, (0, 1, 2, 3), 60 * GIB),
        (1, (), 20 * GIB),
    ]


def test_the_cells_of_a_guest_hold_its_huge_pages_where_its_memory_is_not_stated() -> None:
    request = Request(4, PinningOptions(scope=Scope.ANY, guest_numa=GuestNuma.MIRROR), huge_pages={GIB: 6})
    found = placed(TWO_SOCKETS, everything(TWO_SOCKETS, "0-7"), request)
    assert [(cell.node, cell.vcpus, cell.memory // GIB) for cell in found.guest_cells] == [
        (0, (0, 1, 2, 3), 4),
        (1, (), 2),
    ]


def test_pages_that_linux_takes_page_by_page_are_given_evenly_and_those_of_cells_near_first() -> None:
    request = Request(4, PinningOptions(scope=Scope.ANY), memory=6 * GIB, huge_pages={GIB: 6})
    free = everything(TWO_SOCKETS)
    assert placed(TWO_SOCKETS, free, request).huge_pages == {0: {GIB: 3}, 1: {GIB: 3}}
    mirrors = replace(request, options=replace(request.options, guest_numa=GuestNuma.MIRROR))
    assert placed(TWO_SOCKETS, free, mirrors).huge_pages == {0: {GIB: 4}, 1: {GIB: 2}}
    even = PinningOptions(scope=Scope.ANY, numa_memory=NumaMemory.INTERLEAVE)
    assert placed(TWO_SOCKETS, free, Request(4, even, memory=80 * GIB)).memory == {0: 40 * GIB, 1: 40 * GIB}


def test_qemus_own_threads_stay_near_the_vcpus() -> None:
    reserving = replace(TWO_SOCKETS, reserved=parse_cpu_list("0-1,8-9"))
    options = PinningOptions(scope=Scope.ANY, emulator_threads=EmulatorThreads.SHARED)
    found = placed(reserving, everything(reserving), Request(4, options, memory=80 * GIB))
    assert found.emulator_cpus == parse_cpu_list("0-1")


def test_a_pool_of_several_nodes_leaves_out_those_without_shared_cpus() -> None:
    options = PinningOptions(scope=Scope.ANY, policy=Policy.NUMA)
    free = everything(TWO_SOCKETS, "0-7")
    found = placed(TWO_SOCKETS, free, Request(4, options, memory=80 * GIB))
    assert found.cpus == parse_cpu_list("0-7")
    assert found.memory == {0: 60 * GIB, 1: 20 * GIB}
