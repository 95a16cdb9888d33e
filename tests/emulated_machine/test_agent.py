"""The agent on a node with several NUMA nodes: discovery, cpusets, threads, drift, other cores, its death.

The API server is real, and so are libvirt, QEMU and KubeVirt's document of the VMs, which went through the
hook.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.emulated_machine.fixtures import on_machines
from harness.emulated_machine.kernels import Kernel
from harness.emulated_machine.machine import EmulatedMachine
from harness.emulated_machine.shape import FOUR_NODES, TWO_SOCKETS
from harness.pod_cgroups import Driver
from kvplace.core.cpuset import cpus_of, format_cpu_list
from kvplace.core.node_topology import read_topology
from kvplace.core.scalars import CpuMask
from tests.emulated_machine import node_inside as inside
from tests.emulated_machine.emulated_node import RESERVED, Guest, Node, install
from tests.emulated_machine.observation import observe, set_online

MACHINES = (TWO_SOCKETS, (FOUR_NODES, Kernel.V6_12))
KILLS = int(os.environ.get("KVPLACE_KILLS", "2"))
"""How often the agent is killed while it moves a VM; more than the default is a sweep to run by hand."""

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def plane(kubernetes_programs: object) -> Iterator[ControlPlane]:
    """An API server that has kvplace's objects and no other client but us."""
    assert kubernetes_programs
    with ControlPlane() as plane:
        install(plane)
        yield plane


@pytest.fixture(scope="module")
def node(plane: ControlPlane, machine: EmulatedMachine) -> Iterator[Node]:
    """The node, with a pod without a request, and its agent."""
    driver = Driver.CGROUPFS if machine.kernel is Kernel.V6_1 else Driver.SYSTEMD
    topology = replace(machine.call(observe).topology, reserved=RESERVED)
    # A NUMA node of four CPUs has none left for QEMU's other threads.
    emulator = "isolate" if machine.shape is TWO_SOCKETS else "with-vcpus"
    node = Node(plane, machine, driver.value, emulator, topology)
    node.register()
    _, node.cgroups = node.create_pod(
        f"busy-{machine.kernel.name.lower().replace('_', '-')}", ("app",), vm=False
    )
    node.start_agent()
    yield node
    node.leave()


@pytest.fixture(scope="module")
def guest(node: Node) -> Guest:
    """A VM of four vCPUs with two I/O threads and strict memory, on cores of its own."""
    return node.start_vm(f"arena-{node.machine.kernel.name.lower().replace('_', '-')}")


@on_machines(*MACHINES)
def test_the_machine_is_published_as_lscpu_and_hwloc_see_it(node: Node) -> None:
    document = node.await_topology()
    published = read_topology(document["spec"])
    assert published == node.topology
    assert document["status"]["enforcement"] == "cgroup"


@on_machines(*MACHINES)
def test_every_thread_the_cgroup_and_the_memory_of_a_vm_are_where_its_placement_states(
    node: Node, guest: Guest
) -> None:
    seen, _ = node.await_vm(guest)
    nodes = format_cpu_list(CpuMask(sum(1 << each for each in guest.placement.placement.memory_nodes)))
    assert seen.mems == nodes
    assert seen.policies == {f"bind:{nodes}"}
    node.await_pinned(guest)
    node.others_share_the_rest(guest)


@on_machines(*MACHINES)
def test_whatever_moves_a_vm_is_undone(node: Node, guest: Guest) -> None:
    pid, first = guest.running.pid, guest.placement.placement.vcpus[0]
    elsewhere = format_cpu_list(CpuMask(guest.placement.placement.cpus & ~(1 << first)))
    # Fewer than make the agent give up on whoever undoes its repairs.
    ways: dict[str, Callable[[], None]] = {
        "taskset": lambda: node.machine.call(inside.taskset, pid, "CPU 0/TCG", elsewhere),
        "virsh vcpupin": lambda: node.machine.call(inside.virsh_vcpupin, guest.running.uri, 0, elsewhere),
        "another cpuset": lambda: node.machine.call(inside.write_cpuset, guest.cgroup, elsewhere),
    }
    for way, drift in ways.items():
        drift()
        _, seconds = node.await_vm(guest)
        print(f"{way} was undone within {seconds:.1f} s")
    node.await_pinned(guest)


@on_machines(*MACHINES)
def test_a_vm_moves_to_another_numa_node_with_its_memory(node: Node, guest: Guest) -> None:
    before = guest.placement.placement
    here = CpuMask(sum(node.topology.node_by_id[each].cpus for each in before.numa_nodes))
    chosen = node.choose(away_from=here)
    assert not set(chosen.memory_nodes) & set(before.memory_nodes)
    node.relocate(guest, chosen)
    node.await_pinned(guest)
    node.settle(guest)
    seen, _ = node.await_vm(guest)
    assert seen.pages.keys() == set(chosen.memory_nodes)
    node.others_share_the_rest(guest)


@on_machines(*MACHINES)
def test_an_agent_that_is_killed_at_any_moment_of_a_move_ends_it_when_it_is_back(
    node: Node, guest: Guest
) -> None:
    moments = random.Random(1)
    for _ in range(KILLS):
        present = guest.placement.placement
        here = CpuMask(sum(node.topology.node_by_id[each].cpus for each in present.numa_nodes))
        node.relocate(guest, node.choose(away_from=here))
        node.kill_agent(moments.uniform(0, 2))
        assert set(cpus_of(guest.placement.placement.owned)) <= set(node.ledger.owners)
        node.start_agent()
        node.await_pinned(guest)
        node.settle(guest)
        node.await_vm(guest)
    node.others_share_the_rest(guest)


@on_machines(*MACHINES)
def test_a_cpu_that_is_down_is_named_and_used_again_when_it_returns(node: Node, guest: Guest) -> None:
    away = guest.placement.placement.vcpus[-1]
    node.machine.call(set_online, away, online=False)
    try:
        node.await_condition(guest, "False", f"CPU {away}")
    finally:
        node.machine.call(set_online, away, online=True)
    node.await_vm(guest)
    node.await_pinned(guest)
