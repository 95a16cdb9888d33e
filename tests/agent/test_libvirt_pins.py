"""The pins that libvirt is informed of."""

from __future__ import annotations

from kvplace.agent.pinning_sweep import domain_pins
from kvplace.agent.verification import Measurement, QemuThread
from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import CpuId, CpuMask
from kvplace.linux.threads import Tid, classify
from tests.agent.nodes_in_use import planned


def test_libvirt_is_informed_of_vcpus_and_of_the_threads_that_exist_on_cpus_that_are_online() -> None:
    placement = Placement(
        Policy.EXCLUSIVE,
        (CpuId(2), CpuId(3)),
        parse_cpu_list("2,3"),
        emulator_cpus=parse_cpu_list("0,8"),
        io_thread_cpus=(parse_cpu_list("0"), parse_cpu_list("1")),
    )
    wanted = planned(placement, cpuset=parse_cpu_list("0-3"), online=parse_cpu_list("0-2"))
    names = ["qemu-kvm", "call_rcu", "vhost-7", "CPU 0/KVM", "CPU 1/KVM", "IO iothread7", "IO iothread3"]
    threads = tuple(QemuThread(Tid(at), classify(name), CpuMask(1)) for at, name in enumerate(names))
    pins = domain_pins(wanted, Measurement(threads))
    assert dict(pins.vcpus) == {0: mask_of([2]), 1: 0}
    assert pins.other_vcpus == mask_of([2])
    assert pins.emulator == mask_of([0])
    assert dict(pins.io_threads) == {3: mask_of([0]), 7: mask_of([1])}


def test_vcpus_that_are_not_plugged_in_have_the_pins_that_they_are_to_start_with() -> None:
    placement = Placement(Policy.EXCLUSIVE, (CpuId(2), CpuId(3)), parse_cpu_list("2,3"))
    wanted = planned(placement, cpuset=parse_cpu_list("2-3"), online=parse_cpu_list("0-3"))
    only_one = Measurement((QemuThread(Tid(1), classify("CPU 0/KVM"), CpuMask(1)),))
    pins = domain_pins(wanted, only_one)
    assert (dict(pins.vcpus), pins.other_vcpus) == ({0: mask_of([2]), 1: mask_of([3])}, mask_of([2, 3]))
