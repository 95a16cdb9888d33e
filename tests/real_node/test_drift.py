"""Changes by others to a VM's threads and to cpusets of a real node are undone."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from harness.libvirt_session.threads import ThreadKind
from harness.real_node.kernel_view import ContainerInKernel
from harness.real_node.kvplace_pods import AGENT
from harness.waiting import wait_until
from tests.real_node.killing import log_end, pods_of
from tests.real_node.vms import Vm, Vms

VIRSH = ("virsh", "--connect", "qemu+unix:///session?socket=/var/run/libvirt/virtqemud-sock")


@pytest.fixture
def vm(vms: Vms) -> Vm:
    """Start a VM whose vCPU owns CPU 1 of n1 and whose other threads are on CPU 0, and wait for a check.

    Its cpuset holds both CPUs, so that its threads can be moved at all.
    """
    running = vms.start("victim", annotations={"cpu-set": "any"}, node="n1")
    running.pinned()
    assert is_as_placed(running)
    return running


def is_as_placed(vm: Vm) -> bool:
    threads = vm.threads()
    return threads.vcpus() == {0: 0b10} and set(threads.emulator().values()) == {0b01}


def repaired(vm: Vm, holds: Callable[[], bool]) -> None:
    """Wait until the kernel's state is as wanted; fails with the log of the agent."""
    wait_until(holds, lambda: f"not repaired; the agent:\n{agents_log(vm)}")


def test_threads_that_a_user_moves_by_hand_come_back(vm: Vm) -> None:
    for thread in vm.threads().threads:
        os.sched_setaffinity(thread.tid, {0, 1} if thread.kind is ThreadKind.EMULATOR else {0})
    assert not is_as_placed(vm)

    repaired(vm, lambda: is_as_placed(vm))
    vm.pinned()


def test_a_pin_that_a_user_gives_to_libvirt_does_not_stay(vms: Vms, vm: Vm) -> None:
    pod = vm.pod()["metadata"]["name"]
    domain = f"{vms.namespace}_{vm.name}"
    in_pod = ("exec", "--namespace", vms.namespace, pod, "-c", "compute", "--")
    vms.cluster.plane.kubectl(*in_pod, *VIRSH, "vcpupin", "--live", domain, "0", "0")

    def pin() -> str:
        return vms.cluster.plane.kubectl(*in_pod, *VIRSH, "vcpupin", domain).split()[-1]

    repaired(vm, lambda: is_as_placed(vm) and pin() == "1")


def test_an_update_by_the_container_runtime_widens_nothing(vms: Vms, vm: Vm) -> None:
    other = vms.busy_pod("other", "n1")
    runtime = vm.node.runtime
    for container, update, own in ((other, "0-1", 0b01), (vm.compute, "0", 0b11)):
        runtime.crictl("update", f"--cpuset-cpus={update}", container.inside.name)
        repaired(vm, has(container, own))
    repaired(vm, lambda: is_as_placed(vm))


def test_a_cpuset_that_a_user_writes_is_written_back(vms: Vms, vm: Vm) -> None:
    other = vms.busy_pod("other", "n1")
    for container, written, own in ((other, "0-1", 0b01), (vm.compute, "0", 0b11)):
        container.write_cpus(written)
        repaired(vm, has(container, own))
    repaired(vm, lambda: is_as_placed(vm))


def agents_log(vm: Vm) -> str:
    """Return the end of the log of the agent on the VM's node."""
    cluster = vm.vms.cluster
    agents = pods_of(cluster, AGENT, "agent")
    return "\n".join(
        log_end(cluster, pod, "agent") for pod in agents if pod["spec"]["nodeName"] == vm.node.name
    )


def has(container: ContainerInKernel, cpus: int) -> Callable[[], bool]:
    return lambda: container.cpus() == cpus
