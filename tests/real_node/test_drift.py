"""What others do to a VM's threads and to cpusets of a real node is undone, each kind within two seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from harness.libvirt_session.threads import ThreadKind
from harness.real_node.kernel_view import ContainerInKernel
from tests.real_node.vms import Vm, Vms

REPAIRED_WITHIN_S = 2.0
PATIENCE_S = 20.0

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


def repaired(holds: Callable[[], bool]) -> float:
    """Wait until it holds and return the seconds that it took. What is waited for is the kernel's state."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < PATIENCE_S, "not repaired"
        time.sleep(0.01)
    return time.monotonic() - started


def test_threads_that_a_user_moves_by_hand_come_back(vm: Vm) -> None:
    for thread in vm.threads().threads:
        os.sched_setaffinity(thread.tid, {0, 1} if thread.kind is ThreadKind.EMULATOR else {0})
    assert not is_as_placed(vm)

    assert repaired(lambda: is_as_placed(vm)) < REPAIRED_WITHIN_S
    vm.pinned()


def test_a_pin_that_a_user_gives_to_libvirt_does_not_stay(vms: Vms, vm: Vm) -> None:
    pod = vm.pod()["metadata"]["name"]
    domain = f"{vms.namespace}_{vm.name}"
    in_pod = ("exec", "--namespace", vms.namespace, pod, "-c", "compute", "--")
    started = time.monotonic()
    vms.cluster.plane.kubectl(*in_pod, *VIRSH, "vcpupin", "--live", domain, "0", "0")

    def pin() -> str:
        return vms.cluster.plane.kubectl(*in_pod, *VIRSH, "vcpupin", domain).split()[-1]

    repaired(lambda: is_as_placed(vm) and pin() == "1")
    # Each check of libvirt goes through kubectl and a process in the pod, which has its own time.
    assert time.monotonic() - started < 2 * REPAIRED_WITHIN_S


def test_an_update_by_the_container_runtime_widens_nothing(vms: Vms, vm: Vm) -> None:
    other = vms.busy_pod("other", "n1")
    runtime = vm.node.runtime
    for container, update, own in ((other, "0-1", 0b01), (vm.compute, "0", 0b11)):
        runtime.crictl("update", f"--cpuset-cpus={update}", container.inside.name)
        assert repaired(has(container, own)) < REPAIRED_WITHIN_S
    assert repaired(lambda: is_as_placed(vm)) < REPAIRED_WITHIN_S


def test_a_cpuset_that_a_user_writes_is_written_back(vms: Vms, vm: Vm) -> None:
    other = vms.busy_pod("other", "n1")
    for container, written, own in ((other, "0-1", 0b01), (vm.compute, "0", 0b11)):
        container.write_cpus(written)
        assert repaired(has(container, own)) < REPAIRED_WITHIN_S
    assert repaired(lambda: is_as_placed(vm)) < REPAIRED_WITHIN_S


def has(container: ContainerInKernel, cpus: int) -> Callable[[], bool]:
    return lambda: container.cpus() == cpus
