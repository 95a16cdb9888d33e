"""QEMU's own threads run on reserved CPUs near the VM or on its own CPUs, never on another socket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope
from kvplace.core.topology import Topology
from tests.core.allocator.shapes import machine, slit
from tests.core.allocator.validity import key_of_valid

CORES = [f"{cpu}-{cpu + 1}" for cpu in range(0, 16, 2)]
TWO_SOCKETS = machine(packages=["0-7", "8-15"], nodes=["0-7", "8-15"], l3=["0-7", "8-15"], cores=CORES)
SUB_NUMA = machine(
    packages=["0-11", "12-15"],
    nodes=["0-3", "4-7", "8-11", "12-15"],
    l3=["0-11", "12-15"],
    cores=CORES,
    distances=slit([10, 12, 14, 21], [12, 10, 13, 21], [14, 13, 10, 21], [21, 21, 21, 10]),
)
ONE_NODE = machine(packages=["0-7", "8-15"], nodes=["0-15"], l3=["0-7", "8-15"], cores=CORES)


@pytest.mark.parametrize(
    ("on", "reserved", "free", "emulator"),
    [
        # The reserved CPUs of its NUMA node, whatever is reserved elsewhere.
        (TWO_SOCKETS, "0-1,8-9", "10-15", "8-9"),
        # The reserved CPUs of its socket: the nearest, and all that are equally near.
        (SUB_NUMA, "0-1,12-13", "8-11", "0-1"),
        (SUB_NUMA, "0-1,4-5,12-13", "8-11", "4-5"),
        (SUB_NUMA, "0-1,8-9,12-13", "4-7", "0-1"),
        # Its own, where its socket has none: the reserved core of another socket is not used.
        (TWO_SOCKETS, "0-1", "8-11", "8-11"),
        (SUB_NUMA, "12-13", "8-11", "8-11"),
        (ONE_NODE, "0-1", "8-11", "8-11"),
        (ONE_NODE, "0-1,8-9", "10-13", "8-9"),
    ],
)
@pytest.mark.parametrize("policy", [Policy.EXCLUSIVE, Policy.SHARE])
def test_the_nearest_reserved_cpus_of_the_socket_serve_else_the_vms_own(
    on: Topology, reserved: str, free: str, emulator: str, policy: Policy
) -> None:
    reserving = replace(on, reserved=parse_cpu_list(reserved))
    available = free_of(reserving, Ledger()).within(parse_cpu_list(free))
    request = Request(4, PinningOptions(scope=Scope.ONE_SOCKET, policy=policy), io_threads=2)
    found = place(reserving, available, request)
    assert isinstance(found, Placement)
    key_of_valid(reserving, available, request, found)
    assert format_cpu_list(found.emulator_cpus) == emulator
    assert found.io_thread_cpus == (found.emulator_cpus,) * 2


@pytest.mark.parametrize("emulator_threads", EmulatorThreads)
@pytest.mark.parametrize("policy", [Policy.EXCLUSIVE, Policy.SHARE])
def test_a_plain_pod_has_no_cpus_but_those_that_it_requests(
    emulator_threads: EmulatorThreads, policy: Policy
) -> None:
    """The cpuset of its containers is the cpuset of its placement, and all its threads may run there."""
    reserving = replace(TWO_SOCKETS, reserved=parse_cpu_list("0-1"))
    options = PinningOptions(Scope.ONE_SOCKET, policy, emulator_threads=emulator_threads).of_plain_pod()
    found = place(reserving, free_of(reserving, Ledger()).within(parse_cpu_list("2-7")), Request(4, options))
    assert isinstance(found, Placement)
    assert found.cpus.bit_count() == 4
    assert found.emulator_cpus & ~found.cpus == 0
