"""The kernel's report about the pod of a claim, compared with its placement.

A pod is pinned when nothing differs. The comparison is pure: what was measured and what is wanted go in,
differences come out, each a sentence for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.scalars import NO_BYTES, NO_CPUS, Bytes, CpuMask, NumaId
from kvplace.linux.affinity import Tid
from kvplace.linux.qemu import ThreadName, ThreadRole

MISPLACED_ALLOWED = Bytes(256 * 1024 * 1024)
"""Memory outside the nodes of a strict binding that does not count as a difference: virt-launcher and libvirt
use it."""

THREADS_BESIDE_VCPUS = 1024
"""Threads that a QEMU may have beside two for each vCPU: I/O, vhost, migration and its pool of workers."""


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread as the kernel has it."""

    tid: Tid
    name: ThreadName
    cpus: CpuMask
    """The online CPUs that it may run on."""


@dataclass(frozen=True)
class Measurement:
    """One reading of one pod."""

    threads: tuple[Thread, ...] = ()
    """Those of its QEMU; none for a plain pod, and for a VM before its QEMU is there."""
    cpusets: Mapping[str, CpuMask] = field(default_factory=lambda: MappingProxyType({}))
    """The effective cpuset of each container that runs the claim, by container name."""
    memory: Mapping[NumaId, Bytes] = field(default_factory=lambda: MappingProxyType({}))
    """Memory of the VM by NUMA node; empty where it was not read."""

    @cached_property
    def io_threads(self) -> Mapping[int, int]:
        """The position of each I/O thread among all of them in ascending order, by its number."""
        found = {thread.name.number for thread in self.threads if thread.name.role is ThreadRole.IO_THREAD}
        return {number: position for position, number in enumerate(sorted(found))}

    @property
    def cpus(self) -> CpuMask:
        """The CPUs that the pod's threads may actually run on."""
        found = NO_CPUS
        for cpus in [thread.cpus for thread in self.threads] or self.cpusets.values():
            found |= cpus
        return found


@dataclass(frozen=True, slots=True)
class ThreadDifference:
    """A thread that may run on other CPUs than it should."""

    thread: Thread
    should: CpuMask

    def __str__(self) -> str:
        return (
            f"{self.thread.name} may run on CPU {format_cpu_list(self.thread.cpus) or 'none'} "
            f"instead of {format_cpu_list(self.should)}"
        )


@dataclass(frozen=True, slots=True)
class OfflineDifference:
    """A thread with no online CPU, so that it cannot run where it should."""

    thread: Thread
    should: CpuMask

    def __str__(self) -> str:
        return (
            f"{self.thread.name} runs on CPU {format_cpu_list(self.thread.cpus)}, because CPU "
            f"{format_cpu_list(self.should)} is offline"
        )


@dataclass(frozen=True, slots=True)
class MissingThread:
    """A vCPU of the placement without a thread in QEMU."""

    vcpu: int

    def __str__(self) -> str:
        return f"vCPU {self.vcpu} has no thread"


@dataclass(frozen=True, slots=True)
class CpusetDifference:
    """A container with a wrong cpuset."""

    container: str
    has: CpuMask
    should: CpuMask

    def __str__(self) -> str:
        how = "wider" if self.has & ~self.should else "narrower"
        return (
            f"the cpuset of container {self.container} is CPU {format_cpu_list(self.has) or 'none'}, "
            f"{how} than {format_cpu_list(self.should)}"
        )


@dataclass(frozen=True, slots=True)
class MemoryDifference:
    """Memory on a NUMA node that a strict binding does not name."""

    node: NumaId
    amount: Bytes
    should: tuple[NumaId, ...]

    def __str__(self) -> str:
        nodes = format_cpu_list(mask_of(self.should))
        return f"{self.amount >> 20} MiB are on NUMA node {self.node} instead of {nodes}"


Difference = ThreadDifference | OfflineDifference | MissingThread | CpusetDifference | MemoryDifference


@dataclass(frozen=True, slots=True)
class Wanted:
    """The desired state of one pod."""

    placement: Placement
    cpuset: CpuMask
    """The cpuset of the containers that run its claim; none where nothing sets it.

    For policy `numa`, and without a placement of its own, the threads may use all of it.
    """
    online: CpuMask
    vm: bool
    """Whether it is the pod of a VM; the threads of other pods have no CPUs of their own."""

    @property
    def most_threads(self) -> int:
        """How many threads its QEMU may have; one with more is not measured.

        Thread names and counts are in the hand of whoever controls the VM's pod, and each thread costs.
        """
        return THREADS_BESIDE_VCPUS + 2 * len(self.placement.vcpus)

    @property
    def measures_memory(self) -> bool:
        """Whether the NUMA nodes of its memory matter."""
        return self.placement.numa_memory is NumaMemory.STRICT and bool(self.placement.memory_nodes)

    def cpus_of(self, name: ThreadName, io_threads: Mapping[int, int]) -> CpuMask:
        """Find the CPUs of a thread; none where it may run anywhere in the cpuset.

        `io_threads` are the positions of all I/O threads by number: the placement counts them from 0.
        """
        placement = self.placement
        if placement.policy in (Policy.NUMA, Policy.NONE):
            return self.cpuset or placement.cpus
        match name.role:
            case ThreadRole.VCPU:
                return placement.cpus_of_vcpu(name.number)
            case ThreadRole.IO_THREAD:
                return placement.cpus_of_io_thread(io_threads[name.number])
            case ThreadRole.EMULATOR | ThreadRole.VHOST | ThreadRole.MIGRATION:
                return placement.emulator_cpus


def differences(wanted: Wanted, measured: Measurement) -> tuple[Difference, ...]:
    """State what differs; nothing when the pod is pinned as its placement states."""
    return (
        *_threads(wanted, measured),
        *_missing(wanted, measured),
        *_cpusets(wanted, measured),
        *_memory(wanted, measured),
    )


def _threads(wanted: Wanted, measured: Measurement) -> Iterator[Difference]:
    if not wanted.vm:
        return
    for thread in measured.threads:
        should = wanted.cpus_of(thread.name, measured.io_threads)
        if not should:
            continue
        # What is known of CPUs that went offline or came back may be a moment old.
        if thread.cpus in (should, should & wanted.online):
            continue
        if should & wanted.online:
            yield ThreadDifference(thread, should & wanted.online)
        else:
            yield OfflineDifference(thread, should)


def _missing(wanted: Wanted, measured: Measurement) -> Iterator[Difference]:
    if wanted.vm and measured.threads:
        found = {thread.name.number for thread in measured.threads if thread.name.role is ThreadRole.VCPU}
        for vcpu in range(len(wanted.placement.vcpus)):
            if vcpu not in found:
                yield MissingThread(vcpu)


def _cpusets(wanted: Wanted, measured: Measurement) -> Iterator[Difference]:
    should = wanted.cpuset & wanted.online
    for container, has in measured.cpusets.items():
        if should and has != should:
            yield CpusetDifference(container, has, should)


def _memory(wanted: Wanted, measured: Measurement) -> Iterator[Difference]:
    nodes = wanted.placement.memory_nodes
    if wanted.measures_memory:
        elsewhere = {node: amount for node, amount in measured.memory.items() if node not in nodes}
        if sum(elsewhere.values(), NO_BYTES) > MISPLACED_ALLOWED:
            for node, amount in sorted(elsewhere.items()):
                yield MemoryDifference(node, amount, nodes)
