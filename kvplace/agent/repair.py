"""Puts threads back where they should be, and states what libvirt should know of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from kvplace.agent.verification import Difference, Measurement, OfflineDifference, ThreadDifference, Wanted
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.libvirt.domain_pins import DomainPins
from kvplace.linux.affinity import OutsideCpuset, set_affinity
from kvplace.linux.kernel_files import Gone
from kvplace.linux.qemu import QemuProcess, ThreadRole


def set_threads(qemu: QemuProcess, found: Iterable[Difference]) -> None:
    """Set the affinity of every thread that differs, as far as its cpuset allows it now.

    Threads that have ended are left out. Raises NotPermitted.
    """
    for difference in found:
        if isinstance(difference, ThreadDifference | OfflineDifference) and qemu.has(difference.thread.tid):
            with suppress(Gone, OutsideCpuset):
                set_affinity(difference.thread.tid, difference.should)


def domain_pins(wanted: Wanted, measured: Measurement) -> DomainPins:
    """State what libvirt should keep for the threads that were found; CPUs that are offline are left out."""
    vcpus: dict[int, CpuMask] = {}
    io_threads: dict[int, CpuMask] = {}
    emulator = NO_CPUS
    for thread in measured.threads:
        cpus = wanted.cpus_of(thread.name, measured.io_threads) & wanted.online
        match thread.name.role:
            case ThreadRole.VCPU if cpus:
                vcpus[thread.name.number] = cpus
            case ThreadRole.IO_THREAD if cpus:
                io_threads[thread.name.number] = cpus
            case ThreadRole.EMULATOR:
                emulator = cpus
            case _:
                pass
    return DomainPins(vcpus, emulator, io_threads)
