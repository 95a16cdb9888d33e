"""Checks the threads of every claim again and again, and sets threads on wrong CPUs back.

Synchronous and for one worker thread: everything that may wait for the kernel is here, everything that may
wait for another process (libvirt, the API server) is in `pinning_guard`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvplace.agent.back_off import RepairHistory
from kvplace.agent.node_plan import PodPlan
from kvplace.agent.verification import (
    CpusetDifference,
    Difference,
    Measurement,
    MemoryDifference,
    OfflineDifference,
    ThreadDifference,
    differences,
)
from kvplace.agent.watched_pod import WatchedPod
from kvplace.core.errors import KvplaceError
from kvplace.core.scalars import CpuMask, PodUid
from kvplace.libvirt.domain_pins import DomainPins
from kvplace.linux.affinity import OutsideCpuset, Tid, set_affinity
from kvplace.linux.kernel_files import Gone
from kvplace.linux.qemu import PROC, QemuProcess, ThreadName, ThreadRole

READ_ANEW_S = 60.0
"""How often the names of threads, the workers of the kernel and the memory of a pod are read again."""


@dataclass(frozen=True, slots=True)
class PodFinding:
    """The result of one check of a pod."""

    measured: Measurement
    differences: tuple[Difference, ...] = ()
    """Differences after the repair."""
    problem: str = ""
    """Why it could not be read or set."""
    given_up: bool = False
    drift: tuple[Difference, ...] = ()
    """Drift since the last check: differences that this check found at its begin."""
    pid: int = 0
    """The process of its QEMU; 0 where there is none."""
    pins: DomainPins | None = None
    """The pins that libvirt does not have yet; None when it has all."""

    @property
    def in_order(self) -> bool:
        """Whether nothing differs, and there is nothing to try again or to report."""
        return not (self.differences or self.problem or self.drift) and self.pins is None

    @property
    def follows(self) -> bool:
        """Whether every thread is where it should be; cpuset and memory do not count."""
        return not self.problem and all(
            isinstance(found, CpusetDifference | MemoryDifference) for found in self.differences
        )


@dataclass(slots=True)
class _Pod:
    watched: WatchedPod
    plan: PodPlan
    finding: PodFinding
    read_anew_at: float = 0.0
    right: dict[Tid, CpuMask] = field(default_factory=dict)
    """Threads that were seen where they should be, and where that was."""
    history: RepairHistory = field(default_factory=RepairHistory)
    pins_asked: tuple[int, DomainPins] | None = None
    """The pins that the libvirt of a QEMU was asked to keep."""


class PinningSweep:
    """State that is kept from one check to the next."""

    def __init__(
        self, mounted: Path, *, proc: Path = PROC, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._mounted = mounted
        self._proc = proc
        self._clock = clock
        self._pods: dict[PodUid, _Pod] = {}

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
        anew = now >= pod.read_anew_at or pod.plan != plan
        if not anew and pod.finding.in_order and pod.watched.unchanged():
            return pod.finding
        if anew:
            pod.read_anew_at = now + READ_ANEW_S
        if pod.plan.placement != plan.placement:
            pod.history = RepairHistory()  # earlier repairs concerned other CPUs
        pod.plan = plan
        try:
            finding = self._measure(pod, now, anew=anew)
        except Gone:
            raise
        except KvplaceError as error:
            finding = PodFinding(pod.finding.measured, problem=str(error))
        if finding != pod.finding or finding.drift or finding.pins is not None:
            pod.finding = finding
        return pod.finding

    def _pod(self, plan: PodPlan) -> _Pod:
        pod = self._pods.get(plan.uid)
        if pod is not None and pod.plan.containers == plan.containers:
            return pod
        self._forget(plan.uid)
        watched = WatchedPod(plan.containers, vm=plan.vm, mounted=self._mounted, proc=self._proc)
        pod = self._pods[plan.uid] = _Pod(watched, plan, PodFinding(Measurement()))
        return pod

    def _forget(self, uid: PodUid) -> None:
        pod = self._pods.pop(uid, None)
        if pod is not None:
            pod.watched.close()

    def _measure(self, pod: _Pod, now: float, *, anew: bool) -> PodFinding:
        plan, watched = pod.plan, pod.watched
        measured = _with_memory(
            pod, watched.measure(plan.most_threads, anew=anew, memory=anew and plan.measures_memory)
        )
        at_first = differences(plan, measured)
        drift = _drift(pod.right, at_first)
        found, pins, pid = at_first, None, 0
        if watched.qemu is not None and plan.sets_threads and plan.refusal is None:
            pid = watched.qemu.pid
            if any(map(_is_about_a_thread, at_first)) and pod.history.may_repair(now):
                set_threads(watched.qemu, at_first)
                measured = _with_memory(pod, watched.measure(plan.most_threads))
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
            measured,
            found,
            given_up=pod.history.given_up,
            drift=tuple(one for one in drift if one not in known),
            pid=pid,
            pins=pins,
        )


def _is_about_a_thread(difference: Difference) -> bool:
    return isinstance(difference, ThreadDifference | OfflineDifference)


def _with_memory(pod: _Pod, measured: Measurement) -> Measurement:
    """Keep the memory that was read last where it was not read this time."""
    return measured if measured.memory else replace(measured, memory=pod.finding.measured.memory)


def _drift(right: dict[Tid, CpuMask], found: Iterable[Difference]) -> tuple[ThreadDifference, ...]:
    return tuple(
        one for one in found if isinstance(one, ThreadDifference) and right.get(one.thread.tid) == one.should
    )


def _right(
    before: dict[Tid, CpuMask], plan: PodPlan, measured: Measurement, found: tuple[Difference, ...]
) -> dict[Tid, CpuMask]:
    """Note which threads are right; one that was and is not any more stays noted."""
    wrong = {one.thread.tid for one in found if isinstance(one, ThreadDifference | OfflineDifference)}
    right: dict[Tid, CpuMask] = {}
    for thread in measured.threads:
        if thread.tid in wrong:
            if thread.tid in before:
                right[thread.tid] = before[thread.tid]
        elif should := plan.cpus_of(thread.name, measured.io_threads) & plan.online:
            right[thread.tid] = should
    return right


def set_threads(qemu: QemuProcess, found: Iterable[Difference]) -> None:
    """Set the affinity of every thread that differs, as far as its cpuset allows it now.

    Threads that have ended are left out. Raises NotPermitted.
    """
    for difference in found:
        if isinstance(difference, ThreadDifference | OfflineDifference) and qemu.has(difference.thread.tid):
            with suppress(Gone, OutsideCpuset):
                set_affinity(difference.thread.tid, difference.should)


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
