"""What others do to a VM's threads and to cpusets of a real node is undone, each kind within two seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from harness.real_node.kernel_view import ContainerInKernel
from tests.real_node.vms import Vm, Vms

REPAIRED_WITHIN_S = 2.0
PATIENCE_S = 20.0

VIRSH = ("virsh", "--connect", "qemu+unix:///session?socket=/var/run/libvirt/virtqemud-sock")


@pytest.fixture
def vm(vms: Vms) -> Vm:
    """Start a VM that owns CPU 1 of n1 with all of its threads, and wait until it has been measured."""
    running = vms.start("victim", node="n1")
    running.pinned()
    assert {thread.cpus for thread in running.threads().threads} == {0b10}
    return running


def repaired(holds: Callable[[], bool]) -> float:
    """Wait until it holds and return the seconds that it took. What is waited for is the kernel's state."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < PATIENCE_S, "not repaired"
        time.sleep(0.01)
    return time.monotonic() - started


def all_threads_are_back(vm: Vm, cpus: int = 0b10) -> Callable[[], bool]:
    return lambda: {thread.cpus for thread in vm.threads().threads} == {cpus}


def test_threads_that_somebody_moves_by_hand_come_back(vms: Vms, vm: Vm) -> None:
    # The cpuset has to let them go first, as a runtime's update does; then taskset moves them.
    (vm.compute.cpuset_group / "cpuset.cpus").write_text("0-1")
    for thread in vm.threads().threads:
        os.sched_setaffinity(thread.tid, {0})
    assert all_threads_are_back(vm, 0b01)()

    assert repaired(all_threads_are_back(vm)) < REPAIRED_WITHIN_S
    assert vm.compute.cpus() == 0b10
    assert vm.pinned() == "revision 1: all threads run on CPU 1 as placed"


def test_a_pin_that_somebody_gives_to_libvirt_does_not_stay(vms: Vms, vm: Vm) -> None:
    (vm.compute.cpuset_group / "cpuset.cpus").write_text("0-1")
    pod = vm.pod()["metadata"]["name"]
    domain = f"{vms.namespace}_{vm.name}"
    in_pod = ("exec", "--namespace", vms.namespace, pod, "-c", "compute", "--")
    vms.cluster.plane.kubectl(*in_pod, *VIRSH, "vcpupin", "--live", domain, "0", "0")

    assert repaired(all_threads_are_back(vm)) < REPAIRED_WITHIN_S

    def pin() -> str:
        said = vms.cluster.plane.kubectl(*in_pod, *VIRSH, "vcpupin", domain)
        return said.split()[-1]

    assert pin() == "1"


def test_an_update_by_the_container_runtime_widens_nothing(vms: Vms, vm: Vm) -> None:
    other = vms.busy_pod("other", "n1")
    runtime = vm.node.runtime
    for container, own in ((other, 0b01), (vm.compute, 0b10)):
        runtime.crictl("update", "--cpuset-cpus=0-1", container.inside.name)
        assert repaired(has(container, own)) < REPAIRED_WITHIN_S
    assert all_threads_are_back(vm)()


def test_a_cpuset_that_somebody_writes_is_written_back(vms: Vms, vm: Vm) -> None:
    other = vms.busy_pod("other", "n1")
    (other.cpuset_group / "cpuset.cpus").write_text("0-1")
    assert repaired(has(other, 0b01)) < REPAIRED_WITHIN_S


def has(container: ContainerInKernel, cpus: int) -> Callable[[], bool]:
    return lambda: container.cpus() == cpus
