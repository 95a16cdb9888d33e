"""Puts threads back where they should be, and states what libvirt should know of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from kvplace.agent.node_plan import PodPlan
from kvplace.agent.verification import Difference, Measurement, OfflineDifference, ThreadDifference
from kvplace.core.scalars import CpuMask
from kvplace.libvirt.domain_pins import DomainPins
from kvplace.linux.affinity import OutsideCpuset, set_affinity
from kvplace.linux.kernel_files import Gone
from kvplace.linux.qemu import QemuProcess, ThreadName, ThreadRole


def set_threads(qemu: QemuProcess, found: Iterable[Difference]) -> None:
    """Set the affinity of every thread that differs, as far as its cpuset allows it now.

    Threads that have ended are left out. Raises NotPermitted.
    """
    for difference in found:
        if isinstance(difference, ThreadDifference | OfflineDifference) and qemu.has(difference.thread.tid):
            with suppress(Gone, OutsideCpuset):
                set_affinity(difference.thread.tid, difference.should)


def domain_pins(pod: PodPlan, measured: Measurement) -> DomainPins:
    """State what libvirt should keep of a domain; CPUs that are offline are left out.

    I/O threads are those that were found. vCPUs are those of the placement and all that can be plugged in.
    """
    placed = range(len(pod.placement.vcpus))
    vcpus = {vcpu: _cpus_of(pod, ThreadName(ThreadRole.VCPU, vcpu), measured) for vcpu in placed}
    return DomainPins(
        vcpus,
        _cpus_of(pod, ThreadName(ThreadRole.VCPU, len(placed)), measured),
        _cpus_of(pod, ThreadName(ThreadRole.EMULATOR), measured),
        {
            thread.name.number: cpus
            for thread in measured.threads
            if thread.name.role is ThreadRole.IO_THREAD and (cpus := _cpus_of(pod, thread.name, measured))
        },
    )


def _cpus_of(pod: PodPlan, name: ThreadName, measured: Measurement) -> CpuMask:
    return pod.cpus_of(name, measured.io_threads) & pod.online
