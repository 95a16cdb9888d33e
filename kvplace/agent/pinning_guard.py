"""Keeps every thread of every claim on the CPUs of its placement, and reports whether it is there.

One check a second reads the threads, sets the threads that differ and reads again (`pinning_sweep`, in a
thread of its own). Slow work is done here: libvirt is asked to keep the pins, memory is moved, conditions,
events and the node's report are written.

A newer revision of a placement is not a special case: the plan has changed, the threads differ, they are set.
Only its confirmation is one. It lets the cpuset shrink to the new CPUs. The revision is reported as pinned
only after the narrow cpuset has been read, because then the old CPUs may go to others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvplace.agent import metrics
from kvplace.agent.back_off import AGAIN_S, Deliveries
from kvplace.agent.conditions import PinnedReason
from kvplace.agent.libvirt_pins import LibvirtFailed, LibvirtPins
from kvplace.agent.memory import MemoryMoves
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_plan import NodeContainer, NodePlan, PodPlan
from kvplace.agent.node_report import NodeReport
from kvplace.agent.pinning_sweep import PinningSweep
from kvplace.agent.verification import PodFinding, differences_in_words
from kvplace.core.device_locality import located
from kvplace.core.request import DeviceNuma
from kvplace.core.scalars import NO_CPUS, PodUid
from kvplace.core.well_known_names import PINNED
from kvplace.kube.events import (
    EventRecorder,
    ObjectReference,
    device_not_local,
    pinning_drift,
    pod_reference,
    vmi_reference,
)
from kvplace.kube.object_records import Condition, PodRecord, PodReport
from kvplace.libvirt.domain_pins import DomainPins
from kvplace.linux.threads import PROC

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Between two checks; drift is noticed within this time."""
_LEAST_PAUSE_S = 0.1
"""Between two checks while something changes all the time."""
REVISION_WITHIN_S = 10.0
"""A newer revision that the threads do not follow for so long has failed."""
MEMORY_AGAIN_S = 60.0
"""Memory that could not be moved, where there is nothing to go back to, is tried again after so long."""


class PinningClient(Protocol):
    """The cluster calls of the guard."""

    async def set_pod_condition(self, pod: PodRecord, condition: Condition) -> None:
        """Write one condition of a pod; raises Refused when the pod is gone."""
        ...


class PlannedNode(Protocol):
    """The component that plans for this node and sets cpusets."""

    @property
    def plan(self) -> NodePlan:
        """The plan of this moment; the same object until there is another one."""
        ...

    def containers(self) -> Iterable[NodeContainer]:
        """Return the containers that are created or running, as last known."""
        ...

    def subscribe(self, listener: Callable[[], None], /) -> None:
        """Call the listener after each change of the plan."""
        ...


@dataclass(slots=True)
class _GuardedPod:
    """The state that is kept for one pod."""

    plan: PodPlan | None = None
    finding: PodFinding | None = None
    record: PodRecord | None = None
    """Its pod in the API server at the last report."""
    reported: PodFinding | None = None
    """The finding in its condition; None before the first measurement, and while QEMU does not run."""
    waits_for: int = 0
    """The revision that its threads do not follow yet."""
    since: float = 0.0
    """The moment since when they do not follow it."""
    moving: asyncio.Task[None] | None = None
    """The move of its memory."""
    devices: tuple[object, ...] = ()
    """Revision and devices that were compared last."""
    move_again_at: float = 0.0
    """Its memory is not moved for that revision before this moment."""


class PinningGuard:
    """The loop over all claims of this node."""

    def __init__(
        self,
        own: NodeObjects,
        node: PlannedNode,
        memory: MemoryMoves,
        report: NodeReport,
        events: EventRecorder,
        client: PinningClient,
        *,
        mounted: Path,
        proc: Path = PROC,
        libvirt: LibvirtPins | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`mounted` is where the host's cgroups are mounted, `proc` where its processes are."""
        self._own = own
        self._node = node
        self._memory = memory
        self._report = report
        self._events = events
        self._client = client
        self._clock = clock
        self._libvirt = libvirt or LibvirtPins()
        self._sweep = PinningSweep(mounted, proc=proc, clock=clock)
        self._worker = ThreadPoolExecutor(1, "sweep")
        self._pins = Deliveries(self._tell_libvirt)
        # An API server that is back gets them soon.
        self._conditions = Deliveries(self._write_condition, longest_s=AGAIN_S)
        self._pods: dict[PodUid, _GuardedPod] = {}
        self._wake = asyncio.Event()
        self._closed = False
        node.subscribe(self._wake.set)

    async def run(self) -> None:
        """Check again and again."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pins.run())
                group.create_task(self._conditions.run())
                group.create_task(self._look_again_and_again())
        finally:
            await self.close()

    async def close(self) -> None:
        """Let go of everything that is kept from one check to the next; it cannot check again."""
        if self._closed:
            return
        self._closed = True
        for uid in list(self._pods):
            self._forget(uid)
        await asyncio.get_running_loop().run_in_executor(self._worker, self._sweep.close)
        self._worker.shutdown()

    async def look(self) -> None:
        """Check once every pod, and report changes."""
        whole = self._node.plan
        sees_all = whole.is_complete and self._report.enforcement is not None
        plans = whole.pods
        began = time.perf_counter()
        found = await asyncio.get_running_loop().run_in_executor(
            self._worker, self._sweep.look, list(plans.values())
        )
        metrics.LOOKS.observe(time.perf_counter() - began)
        for uid in self._pods.keys() - plans.keys():
            self._forget(uid)
            self._report.drop_pod(uid)
        for uid, plan in plans.items():
            self._take(plan, found.get(uid))
            self._compare_devices(plan)
        if sees_all:
            self._report.complete()
            self._own.revisions.forget_deleted(container.pod_uid for container in self._node.containers())
        pinned = sum(report.pinned for report in self._report.pods.values())
        metrics.PODS.labels("true").set(pinned)
        metrics.PODS.labels("false").set(len(self._report.pods) - pinned)
        metrics.NOT_PINNED.update(dict.fromkeys(self._not_pinned(), 1))

    def _not_pinned(self) -> Iterator[tuple[str, str, str]]:
        """Name each VM with a False condition, with its namespace and the reason."""
        for uid, progress in self._pods.items():
            plan, reported = progress.plan, progress.reported
            if plan is not None and reported is not None and not reported.condition.status:
                pod = self._own.pods.get(uid)
                yield plan.namespace, plan.pod if pod is None else pod.vm, reported.condition.reason

    async def _look_again_and_again(self) -> None:
        await self._own.wait_until_known()  # a sandbox may have been made with an older revision
        while True:
            self._wake.clear()
            await self.look()
            await asyncio.sleep(_LEAST_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S - _LEAST_PAUSE_S):
                    await self._wake.wait()

    def _take(self, plan: PodPlan, finding: PodFinding | None) -> None:
        """Draw the consequences of one check of one pod."""
        progress = self._pods.setdefault(plan.uid, _GuardedPod())
        record, before = self._own.pods.get(plan.uid), progress.finding
        same = plan == progress.plan and finding is before and record is progress.record
        if same and plan.settled and finding is not None and finding.in_order:
            return
        refusal = plan.refusal
        if refusal is not None and (progress.plan is None or progress.plan.refusal != refusal):
            words = f"{refusal.message} ({refusal.owner})" if refusal.owner else refusal.message
            log.warning("pod %s/%s: %s", plan.namespace, plan.pod, words, extra={"uid": plan.uid})
        progress.plan, progress.record, progress.finding = plan, record, finding
        if finding is not None and finding is not before:
            self._act(finding)
        if finding is None or not finding.is_reportable:
            progress.reported = None
            self._report.put_pod(_report(plan, None))
            self._take_back(plan)
            return
        if not plan.failure:
            self._follow(progress, finding)
        if _may_pass(finding, before) or _is_early(finding):
            if plan.uid not in self._report.pods:
                self._report.put_pod(_report(plan, None))
        else:
            progress.reported = finding
            self._report.put_pod(_report(plan, finding))
            self._say(plan, finding.condition)

    def _act(self, finding: PodFinding) -> None:
        """Report repairs to libvirt, and drift to users."""
        plan = finding.plan
        if finding.pins is not None:
            self._pins.put(plan.uid, (finding.pid, finding.pins), undone=bool(finding.drift))
        if not finding.drift:
            return
        repaired = not set(finding.drift) & set(finding.differences)
        metrics.DRIFTS.labels("repaired" if repaired else "given-up" if finding.given_up else "left").inc()
        words = differences_in_words(finding.drift)
        log.warning("pod %s/%s: %s", plan.namespace, plan.pod, words, extra={"uid": plan.uid})
        for reference in self._regarding(plan):
            self._events.record(pinning_drift(reference, words, repaired=repaired))

    def _compare_devices(self, plan: PodPlan) -> None:
        """Write an event about devices that are not local, once QEMU runs: its cores no longer follow them.

        The hook has compared the devices before and can write only a log.
        """
        progress, report = self._pods[plan.uid], self._report.devices
        given = () if report is None else report.pods.get(plan.uid, ())
        compared = (plan.revision, given)
        if not given or progress.reported is None or progress.devices == compared:
            return
        progress.devices = compared
        mode = plan.bound.device_numa
        if mode is DeviceNuma.OFF:
            return
        found = located(given, plan.placement, self._own.state.topology, mode)
        far = [one.device for one in found if one.is_local is False]
        for reference in self._regarding(plan) if far else ():
            self._events.record(device_not_local(reference, far, plan.placement.numa_nodes))

    def _regarding(self, plan: PodPlan) -> list[ObjectReference]:
        pod = self._own.pods.get(plan.uid)
        regarding = [pod_reference(plan.namespace, plan.pod, plan.uid)]
        if pod is not None and pod.vmi:
            regarding.append(vmi_reference(pod.namespace, pod.vmi, pod.vmi_uid))
        return regarding

    def _follow(self, progress: _GuardedPod, finding: PodFinding) -> None:
        """Confirm a revision that every thread follows, and give up a revision that they cannot follow."""
        plan = finding.plan
        revision, known = plan.revision, self._own.revisions.of(plan.uid)
        if (known is not None and known.confirmed >= revision) or progress.moving is not None:
            return
        if progress.waits_for != revision:
            progress.waits_for, progress.since, progress.move_again_at = revision, self._clock(), 0.0
        if finding.follows and plan.refusal is None:
            if revision > 1 and finding.pid:
                if self._clock() < progress.move_again_at:
                    return
                progress.moving = asyncio.create_task(self._move_memory(plan, progress, finding.pid))
            else:
                self._own.revisions.succeeded(plan.uid, plan.bound)
        elif self._clock() - progress.since >= REVISION_WITHIN_S:
            self._own.revisions.failed(plan.uid, revision, finding.explanation, self._own.ledger)

    async def _move_memory(self, plan: PodPlan, progress: _GuardedPod, pid: int) -> None:
        try:
            if why := await self._memory.move(pid, plan.bound):
                log.warning("pod %s/%s: %s", plan.namespace, plan.pod, why, extra={"uid": plan.uid})
                progress.move_again_at = self._clock() + MEMORY_AGAIN_S
                self._own.revisions.failed(plan.uid, plan.revision, why, self._own.ledger)
            else:
                self._own.revisions.succeeded(plan.uid, plan.bound)
        finally:
            progress.moving = None
            self._wake.set()

    def _say(self, plan: PodPlan, condition: Condition) -> None:
        pod = self._own.pods.get(plan.uid)
        if pod is not None and pod.condition(PINNED) != condition:
            self._conditions.put(plan.uid, condition)
        else:
            self._conditions.drop(plan.uid)  # a condition that is not written yet is out of date

    def _take_back(self, plan: PodPlan) -> None:
        """Report a VM that has ended as pinned no longer."""
        pod = self._own.pods.get(plan.uid)
        said = None if pod is None else pod.condition(PINNED)
        if said is not None and said.status:
            message = f"revision {plan.revision}: its threads have ended"
            self._say(plan, Condition(PINNED, False, PinnedReason.NOT_RUNNING, message))

    async def _write_condition(self, uid: PodUid, condition: Condition) -> None:
        pod = self._own.pods.get(uid)
        if pod is not None and pod.condition(PINNED) != condition:
            await self._client.set_pod_condition(pod, condition)

    async def _tell_libvirt(self, uid: PodUid, due: tuple[int, DomainPins]) -> None:
        pid, pins = due
        progress = self._pods.get(uid)
        if progress is None or progress.finding is None or progress.finding.pid != pid:
            return  # that QEMU has ended, and its process id may be another one's by now
        try:
            await self._libvirt.pin(pid, pins)
        except LibvirtFailed:
            metrics.LIBVIRT_FAILURES.inc()
            raise

    def _forget(self, uid: PodUid) -> None:
        progress = self._pods.pop(uid)
        if progress.moving is not None:
            progress.moving.cancel()
        self._pins.drop(uid)
        self._conditions.drop(uid)


def _may_pass(finding: PodFinding, before: PodFinding | None) -> bool:
    """Whether only a cpuset differs, and for the first time: it is being set right now."""
    return (
        bool(finding.differences)
        and all(found.reason is PinnedReason.CPUSET_DIFFERS for found in finding.differences)
        and (before is None or before.differences != finding.differences)
    )


def _is_early(finding: PodFinding) -> bool:
    """Whether the cpuset that was found in order may still have the CPUs of the revision before."""
    return finding.as_placed and not finding.plan.failure and not finding.plan.settled


def _report(plan: PodPlan, finding: PodFinding | None) -> PodReport:
    return PodReport(
        uid=plan.uid,
        namespace=plan.namespace,
        pod=plan.pod,
        revision=0 if finding is None else plan.revision,
        pinned=finding is not None and finding.as_placed,
        running=True,
        failed_revision=plan.failed_revision,
        restored_placement=plan.bound.to_json() if plan.failed_revision else "",
        cpus=NO_CPUS if finding is None else finding.measured.cpus,
        drift=plan.failure or ("" if finding is None else finding.explanation),
    )
