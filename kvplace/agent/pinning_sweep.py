"""Checks the threads of every claim again and again, and sets threads on wrong CPUs back.

Synchronous and for one worker thread: everything that may wait for the kernel is here, everything that may
wait for another process (libvirt, the API server) is in `pinning_guard`.

The files of a pod stay open. So a check that finds no change is one system call for each thread and
container, below 1 µs each. Only when it finds a change, and now and then, everything is read anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvplace.agent.back_off import RepairHistory
from kvplace.agent.conditions import PinnedReason
from kvplace.agent.node_plan import PodPlan
from kvplace.agent.verification import (
    Difference,
    Measurement,
    PodFinding,
    QemuThread,
    differences,
)
from kvplace.core.cpuset import bits_of
from kvplace.core.errors import KvplaceError
from kvplace.core.scalars import Bytes, CpuMask, NumaId, PodUid
from kvplace.libvirt.domain_pins import DomainPins
from kvplace.linux.cgroups import EFFECTIVE_CPUS, folders_of, processes_of
from kvplace.linux.kernel_files import Gone, KernelError, explained, to_cpu_list
from kvplace.linux.numa_memory import memory_of_cgroup
from kvplace.linux.threads import (
    PROC,
    QemuProcess,
    ThreadName,
    ThreadRole,
    Tid,
    affinity_of,
    find_qemu,
)

READ_ANEW_S = 60.0
"""How often the names of threads, the workers of the kernel and the memory of a pod are read again."""


class PinningSweep:
    """State that is kept from one check to the next."""

    def __init__(
        self, mounted: Path, *, proc: Path = PROC, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._mounted = mounted
        self._proc = proc
        self._clock = clock
        self._pods: dict[PodUid, WatchedPod] = {}

    def look(self, plans: Iterable[PodPlan]) -> dict[PodUid, PodFinding]:
        """Check every pod; the result of a pod is the same object as last time if nothing has changed.

        A pod is left out before its containers start and after they end.
        """
        found: dict[PodUid, PodFinding] = {}
        for plan in filter(lambda plan: plan.containers, plans):
            with suppress(Gone):
                found[plan.uid] = self._look_at(plan)
        for uid in self._pods.keys() - found.keys():
            self._forget(uid)
        return found

    def close(self) -> None:
        """Let go of everything."""
        for uid in list(self._pods):
            self._forget(uid)

    def _look_at(self, plan: PodPlan) -> PodFinding:
        pod = self._pod(plan)
        now = self._clock()
        before = pod.finding.plan
        anew = now >= pod.read_anew_at or before != plan
        if not anew and pod.finding.in_order and pod.unchanged():
            return pod.finding
        if anew:
            pod.read_anew_at = now + READ_ANEW_S
        if before.placement != plan.placement:
            pod.history = RepairHistory()  # earlier repairs concerned other CPUs
        try:
            finding = self._measure(pod, plan, now, anew=anew)
        except Gone:
            raise
        except KvplaceError as error:
            finding = PodFinding(plan, pod.finding.measured, problem=str(error))
        if finding != pod.finding or finding.drift or finding.pins is not None:
            pod.finding = finding
        return pod.finding

    def _pod(self, plan: PodPlan) -> WatchedPod:
        pod = self._pods.get(plan.uid)
        if pod is not None and pod.finding.plan.containers == plan.containers:
            return pod
        self._forget(plan.uid)
        pod = self._pods[plan.uid] = WatchedPod(plan, self._mounted, self._proc)
        return pod

    def _forget(self, uid: PodUid) -> None:
        pod = self._pods.pop(uid, None)
        if pod is not None:
            pod.close()

    def _measure(self, pod: WatchedPod, plan: PodPlan, now: float, *, anew: bool) -> PodFinding:
        measured = _with_memory(
            pod, pod.measure(plan.most_threads, anew=anew, memory=anew and plan.measures_memory)
        )
        at_first = differences(plan, measured)
        drift = _drift(pod.right, at_first)
        found, pins, pid = at_first, None, 0
        if pod.qemu is not None and plan.sets_threads and plan.refusal is None:
            pid = pod.qemu.pid
            if any(one.thread for one in at_first) and pod.history.may_repair(now):
                for one in at_first:
                    if one.thread is not None:
                        pod.qemu.set_affinity(one.thread.tid, one.should)
                measured = _with_memory(pod, pod.measure(plan.most_threads))
                found = differences(plan, measured)
                if drift and not set(drift) & set(found):
                    pod.history = pod.history.repaired(now)
            if not found:
                pod.history = pod.history.intact(now)
            asked = (pid, domain_pins(plan, measured))
            # Of a thread that has only begun somewhere else libvirt keeps nothing.
            if asked != pod.pins_asked or (drift and found != at_first):
                pod.pins_asked, pins = asked, asked[1]
        pod.right = _right(pod.right, plan, measured, found)
        known = set(pod.finding.differences)
        return PodFinding(
            plan,
            measured,
            found,
            given_up=pod.history.given_up,
            drift=tuple(one for one in drift if one not in known),
            pid=pid,
            pins=pins,
        )


def _with_memory(pod: WatchedPod, measured: Measurement) -> Measurement:
    """Keep the memory that was read last where it was not read this time."""
    return measured if measured.memory else replace(measured, memory=pod.finding.measured.memory)


def _drift(right: dict[Tid, CpuMask], found: Iterable[Difference]) -> tuple[Difference, ...]:
    elsewhere = (one for one in found if one.reason is PinnedReason.THREADS_ELSEWHERE)
    return tuple(one for one in elsewhere if one.thread and right.get(one.thread.tid) == one.should)


def _right(
    before: dict[Tid, CpuMask], plan: PodPlan, measured: Measurement, found: tuple[Difference, ...]
) -> dict[Tid, CpuMask]:
    """Note which threads are right; one that was and is not any more stays noted."""
    wrong = {one.thread.tid for one in found if one.thread}
    right: dict[Tid, CpuMask] = {}
    for thread in measured.threads:
        if thread.tid in wrong:
            if thread.tid in before:
                right[thread.tid] = before[thread.tid]
        elif should := plan.cpus_of(thread.name, measured.io_threads) & plan.online:
            right[thread.tid] = should
    return right


def domain_pins(pod: PodPlan, measured: Measurement) -> DomainPins:
    """State the pins that libvirt should keep for a domain, without CPUs that are offline.

    I/O threads are the ones that were found. vCPUs are all of the placement, and all that can be plugged in.
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


MOST_PROCESSES = 1024
"""In the containers that run a claim; the container of a VM has about ten."""
_LONGEST_LIST = 65536
_COMPARED = 4096
"""Bytes of a cpuset that are compared: enough for every machine with CPUs in ranges."""


class WatchedPod:
    """One pod from check to check: its last finding, and the files that are kept open for it."""

    def __init__(self, plan: PodPlan, mounted: Path, proc: Path = PROC) -> None:
        self.containers = plan.containers
        self.vm = plan.vm
        self.finding = PodFinding(plan)
        """The last one."""
        self.read_anew_at = 0.0
        self.right: dict[Tid, CpuMask] = {}
        """Threads that were seen on the CPUs of their plan, with these CPUs."""
        self.history = RepairHistory()
        self.pins_asked: tuple[int, DomainPins] | None = None
        """The pins that the libvirt of a QEMU was asked to keep."""
        self.qemu: QemuProcess | None = None
        self._mounted = mounted
        self._proc = proc
        self._cpusets: dict[str, _EffectiveCpusFile] = {}
        self._affinities: list[tuple[Tid, set[int]]] = []

    def close(self) -> None:
        """Let go of everything."""
        for file in self._cpusets.values():
            file.close()
        if self.qemu is not None:
            self.qemu.close()

    def unchanged(self) -> bool:
        """Return whether everything is as it was measured last."""
        if self.vm and self.qemu is None:
            return False
        affinity = os.sched_getaffinity
        try:
            if self.qemu is not None and self.qemu.has_new_threads:
                return False
            if len(self._cpusets) < len(self.containers):
                return False
            for file in self._cpusets.values():
                if not file.unchanged():
                    return False
            for tid, cpus in self._affinities:
                if affinity(tid) != cpus:
                    return False
        except OSError:
            return False
        return True

    def measure(self, most_threads: int, *, anew: bool = False, memory: bool = False) -> Measurement:
        """Read everything; `anew` also the names of known threads and the workers of the kernel.

        Raises Gone when the pod's containers have ended, NotPermitted, or KernelError, also for a QEMU with
        more than `most_threads` and for a container with more than `MOST_PROCESSES`.
        """
        self._open_cpusets()
        cpusets = self._read_cpusets()
        threads = self._threads(most_threads, anew=anew)
        return Measurement(threads, cpusets, self._memory() if memory and threads else {})

    def _open_cpusets(self) -> None:
        """Open the closed ones: a container may not have started yet, or may have ended."""
        for container in self.containers:
            if container.name not in self._cpusets:
                with suppress(Gone):
                    self._cpusets[container.name] = _EffectiveCpusFile(container.cgroup)
        if not self._cpusets:
            raise Gone("no container of the pod has started, or all have ended")

    def _read_cpusets(self) -> dict[str, CpuMask]:
        found = {}
        for name, file in list(self._cpusets.items()):
            try:
                found[name] = file.read()
            except Gone:
                self._cpusets.pop(name).close()
        if not found:
            raise Gone("all containers of the pod have ended")
        return found

    def _threads(self, most: int, *, anew: bool) -> tuple[QemuThread, ...]:
        if not self.vm:
            return ()
        if self.qemu is None or anew:
            processes = [pid for container in self.containers for pid in processes_of(container.cgroup)]
            if len(processes) > MOST_PROCESSES:
                raise KernelError(
                    f"its containers have {len(processes)} processes, more than the {MOST_PROCESSES} "
                    "that are searched for QEMU"
                )
            if self.qemu is not None:
                self.qemu.adopt_helpers(processes)
            else:
                self.qemu = find_qemu(processes, self._proc, most_threads=most)
        if self.qemu is None:
            return ()
        try:
            names = self.qemu.threads(most, anew=anew)
        except Gone:
            self.qemu.close()
            self.qemu = None
            return ()
        threads = []
        for tid, name in names.items():
            with suppress(Gone):
                threads.append(QemuThread(tid, name, affinity_of(tid)))
        self._affinities = [(thread.tid, set(bits_of(thread.cpus))) for thread in threads]
        return tuple(threads)

    def _memory(self) -> dict[NumaId, Bytes]:
        if self.qemu is None:
            return {}
        process, container = self._proc / str(self.qemu.pid), self.containers[0].cgroup
        return memory_of_cgroup(folders_of(process, self._mounted, container))


class _EffectiveCpusFile:
    """The file with the effective cpuset of a cgroup."""

    def __init__(self, cgroup: Path) -> None:
        for name in EFFECTIVE_CPUS:
            self._path = cgroup / name
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise explained(error, self._path) from None
            self._text = b""
            return
        raise Gone(f"{cgroup} does not exist or has no cpuset")

    def close(self) -> None:
        os.close(self._descriptor)

    def unchanged(self) -> bool:
        return os.pread(self._descriptor, _COMPARED, 0) == self._text[:_COMPARED]

    def read(self) -> CpuMask:
        try:
            self._text = os.pread(self._descriptor, _LONGEST_LIST, 0)
        except OSError as error:
            raise explained(error, self._path) from None
        return to_cpu_list(self._text.decode(errors="replace"), self._path)
