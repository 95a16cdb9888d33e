"""Machines where every core is a package: the NUMA nodes stand in for packages as a level."""

from __future__ import annotations

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.free_resources import free_blocks_of, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.occupant import locality_of
from kvplace.core.placement import Placement, Reason, Refusal
from kvplace.core.request import Level, PinningOptions, Request, Scope
from kvplace.core.topology import Topology
from tests.core.allocator.shapes import machine, slit

CORES = [f"{2 * core}-{2 * core + 1}" for core in range(8)]
EACH_A_SOCKET = machine(
    packages=CORES,
    nodes=["0-7", "8-15"],
    l3=CORES,
    cores=CORES,
    distances=slit([10, 21], [21, 10]),
)
TWO_SOCKETS = machine(packages=["0-7", "8-15"], nodes=["0-7", "8-15"], l3=CORES, cores=CORES)


def placed(on: Topology, vcpus: int, scope: Scope, only: str | None = None) -> Placement:
    free = free_of(on, Ledger(), only=None if only is None else parse_cpu_list(only))
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
    free_blocks = free_blocks_of(EACH_A_SOCKET, EACH_A_SOCKET.cpus, parse_cpu_list("0-3,6-15"))
    assert free_blocks.largest[Level.SOCKET].cpus == 8
