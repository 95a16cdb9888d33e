"""Machines where every core is a package: the NUMA nodes stand in for packages as a level."""

from __future__ import annotations

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.free_resources import free_blocks_of, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.moves.suggestions import find_suggestions
from kvplace.core.occupant import locality_of
from kvplace.core.placement import Placement, Reason, Refusal
from kvplace.core.request import Level, PinningOptions, Request, Scope
from kvplace.core.scalars import Bytes
from kvplace.core.topology import Topology
from tests.core.allocator.shapes import machine, slit
from tests.core.machines import GIB, make_node

CORES = [f"{2 * core}-{2 * core + 1}" for core in range(8)]
EACH_A_SOCKET = machine(
    packages=CORES,
    nodes=["0-7", "8-15"],
    l3=CORES,
    cores=CORES,
    distances=slit([10, 21], [21, 10]),
)
EACH_A_SOCKET_AND_A_NODE = machine(
    packages=CORES,
    nodes=CORES,
    l3=CORES,
    cores=CORES,
    distances=slit(*([10 if one == other else 20 for other in range(8)] for one in range(8))),
    memory=[4] * 8,
)
TWO_SOCKETS = machine(packages=["0-7", "8-15"], nodes=["0-7", "8-15"], l3=CORES, cores=CORES)


def placed(on: Topology, vcpus: int, scope: Scope, only: str | None = None) -> Placement:
    free = free_of(on, Ledger()).within(on.cpus if only is None else parse_cpu_list(only))
    answer = place(on, free, Request(vcpus, PinningOptions(scope=scope)))
    assert isinstance(answer, Placement), answer
    return answer


@pytest.mark.parametrize("scope", [Scope.ONE_SOCKET, Scope.ONE_NUMA, Scope.SPREAD_SOCKETS, Scope.ANY])
@pytest.mark.parametrize("vcpus", [1, 3, 8])
def test_a_vm_gets_the_cores_that_it_gets_where_the_numa_nodes_are_the_sockets(
    scope: Scope, vcpus: int
) -> None:
    for only in ("0-15", "0-3,6-15", "1,3,5,7,8-15"):
        found, like = (placed(on, vcpus, scope, only) for on in (EACH_A_SOCKET, TWO_SOCKETS))
        assert found.vcpus == like.vcpus
        assert found.numa_nodes == like.numa_nodes
        assert locality_of(EACH_A_SOCKET, found)[:2] == (1, 1)


def test_the_sockets_that_linux_numbers_are_still_named() -> None:
    assert placed(EACH_A_SOCKET, 4, Scope.ONE_SOCKET).packages == (0, 1)


def test_equal_shares_go_to_numa_nodes() -> None:
    found = placed(EACH_A_SOCKET, 10, Scope.SPREAD_SOCKETS)
    assert (mask_of(found.vcpus) & 0xFF).bit_count() == 5


def test_a_refusal_names_numa_nodes() -> None:
    answer = place(EACH_A_SOCKET, free_of(EACH_A_SOCKET, Ledger()), Request(9))
    assert isinstance(answer, Refusal)
    assert (answer.reason, answer.message) == (
        Reason.NO_SOCKET_FITS,
        "no NUMA node with 9 free CPUs, best 8 on numa 0",
    )


def test_the_largest_free_block_of_a_socket_is_that_of_a_numa_node() -> None:
    free_blocks = free_blocks_of(EACH_A_SOCKET, parse_cpu_list("0-3,6-15"))
    assert free_blocks.largest[Level.SOCKET].cpus == 8


@pytest.mark.parametrize("scope", [Scope.ONE_SOCKET, Scope.SPREAD_SOCKETS])
def test_the_machine_is_one_socket_where_every_core_is_a_numa_node_too(scope: Scope) -> None:
    found = placed(EACH_A_SOCKET_AND_A_NODE, 5, scope, "1-15")
    assert (found.numa_nodes, mask_of(found.vcpus)) == ((0, 1, 2), parse_cpu_list("1-5"))
    assert locality_of(EACH_A_SOCKET_AND_A_NODE, found)[:2] == (1, 3)


def test_a_refusal_names_such_a_machine() -> None:
    free = free_of(EACH_A_SOCKET_AND_A_NODE, Ledger())
    requests = [Request(17), Request(1, memory=Bytes(40 * GIB))]
    answers = [place(EACH_A_SOCKET_AND_A_NODE, free, request) for request in requests]
    assert [answer.message for answer in answers if isinstance(answer, Refusal)] == [
        "no machine with 17 free CPUs, best 16 on the machine",
        "no machine with 1 free CPU and 40Gi of free memory, best 32Gi on the machine",
    ]


def test_a_change_that_helps_names_numa_nodes() -> None:
    free = free_of(EACH_A_SOCKET, Ledger())
    (fewer,) = [
        suggestion
        for suggestion in find_suggestions(make_node(EACH_A_SOCKET, ()), free, Request(9)).found
        if suggestion.field == "vcpus"
    ]
    assert fewer.sentence == "with 8 vCPUs it fits on NUMA node 0"
