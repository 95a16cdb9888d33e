"""Keeps every thread of every claim where its placement states, and states whether it is.

One check a second reads what the kernel has, sets what differs and reads again (`pinning_sweep`, in a thread
of its own). What may take its time is done here: libvirt is asked to keep the pins, memory is moved,
conditions, events and the node's report are written.

A newer revision of a placement is not a special case: the wanted state has changed, the threads differ, they
are set. Only its confirmation is one. It lets the cpuset shrink to the new CPUs, and the revision is not
reported as pinned before that has been read, because then the old CPUs may go to others.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvplace.agent import metrics
from kvplace.agent.claims_here import ClaimHere, ClaimsHere, PlacementsInForce
from kvplace.agent.conditions import PinnedReason
from kvplace.agent.deliveries import AGAIN_S, Deliveries
from kvplace.agent.enforced_containers import EnforcedContainers
from kvplace.agent.libvirt_pins import LibvirtFailed, LibvirtPins
from kvplace.agent.node_report import NodeReport
from kvplace.agent.own_node import OwnNode
from kvplace.agent.pinned_report import Verdict, differences_in_words
from kvplace.agent.pinning_sweep import Finding, PinningSweep
from kvplace.agent.verification import CpusetDifference
from kvplace.core.marks import PINNED
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, PodUid
from kvplace.kube.conditions import Condition
from kvplace.kube.events import EventRecorder, pinning_drift, pod_reference, vmi_reference
from kvplace.kube.records import PodRecord, PodReport
from kvplace.libvirt.domain_pins import DomainPins
from kvplace.linux.qemu import PROC

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


class FailedRevision(Protocol):
    """A revision that this node could not carry out."""

    @property
    def revision(self) -> int: ...
    @property
    def why(self) -> str: ...


class Revisions(PlacementsInForce, Protocol):
    """Which revision of each pod's placement is in effect, and what becomes of a newer one."""

    def failure(self, uid: PodUid) -> FailedRevision | None:
        """Return why the newest revision of a pod was given up; None if it was not."""
        ...

    def succeeded(self, uid: PodUid, placement: PodPlacement) -> None:
        """Note that every thread of a pod was seen where a placement states."""
        ...

    def failed(self, uid: PodUid, why: str) -> None:
        """Give the newest revision of a pod up, unless there is nothing to go back to."""
        ...

    async def move_memory(self, pid: int, placement: PodPlacement) -> str:
        """Move the memory of a QEMU to the NUMA nodes of a placement; returns what failed, or nothing."""
        ...


@dataclass(slots=True)
class _Progress:
    """The state that is kept for one pod."""

    claim: ClaimHere | None = None
    finding: Finding | None = None
    seen: tuple[object, ...] = ()
    """All else that decided what was reported last."""
    verdict: Verdict | None = None
    """What its condition states; None before the first statement, and while QEMU does not run."""
    waits_for: int = 0
    """The revision that its threads do not follow yet."""
    since: float = 0.0
    """Since when they have not."""
    moving: asyncio.Task[None] | None = None
    """The move of its memory."""
    move_again_at: float = 0.0
    """Its memory is not moved for that revision before this moment."""


class PinningGuard:
    """The loop over all claims of this node."""

    def __init__(
        self,
        own: OwnNode,
        enforced: EnforcedContainers,
        revisions: Revisions,
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
        self._enforced = enforced
        self._claims = ClaimsHere(own, enforced, revisions)
        self._revisions = revisions
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
        self._pods: dict[PodUid, _Progress] = {}
        self._wake = asyncio.Event()
        self._closed = False
        own.subscribe(self._wake.set)

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
        """Check once every pod, and state what has changed."""
        sees_all = self._report.enforcement is not None
        claims = self._claims.now()
        targets = [claim.target for claim in claims.values()]
        began = time.perf_counter()
        found = await asyncio.get_running_loop().run_in_executor(self._worker, self._sweep.look, targets)
        metrics.LOOKS.observe(time.perf_counter() - began)
        for uid in self._pods.keys() - claims.keys():
            self._forget(uid)
            self._report.drop_pod(uid)
        for uid, claim in claims.items():
            self._take(claim, found.get(uid))
        if sees_all:
            self._report.complete()
            self._own.forget_deleted(container.pod_uid for container in self._enforced.containers())
        pinned = sum(report.pinned for report in self._report.pods.values())
        metrics.PODS.labels("true").set(pinned)
        metrics.PODS.labels("false").set(len(self._report.pods) - pinned)
        metrics.NOT_PINNED.update(dict.fromkeys(self._not_pinned(), 1))

    def _not_pinned(self) -> Iterator[tuple[str, str, str]]:
        """Name each VM with a False condition, with its namespace and the reason."""
        for uid, progress in self._pods.items():
            claim, verdict = progress.claim, progress.verdict
            if claim is not None and verdict is not None and not verdict.condition.status:
                pod = self._own.pods.get(uid)
                yield claim.namespace, claim.pod if pod is None else pod.vm, verdict.condition.reason

    async def _look_again_and_again(self) -> None:
        await self._own.wait_until_known()  # what a sandbox was made with may be an older revision
        while True:
            self._wake.clear()
            await self.look()
            await asyncio.sleep(_LEAST_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S - _LEAST_PAUSE_S):
                    await self._wake.wait()

    def _take(self, claim: ClaimHere, finding: Finding | None) -> None:
        """Draw the consequences of one check of one pod."""
        progress = self._pods.setdefault(claim.uid, _Progress())
        failure = self._revisions.failure(claim.uid)
        seen = (finding, self._own.pods.get(claim.uid), failure)
        same = claim == progress.claim and all(map(operator.is_, seen, progress.seen))
        if same and claim.settled and finding is not None and finding.in_order:
            return
        refusal = claim.target.refusal
        if refusal is not None and (progress.claim is None or progress.claim.target.refusal != refusal):
            words = f"{refusal.message} ({refusal.owner})" if refusal.owner else refusal.message
            log.warning("pod %s/%s: %s", claim.namespace, claim.pod, words, extra={"uid": claim.uid})
        progress.claim, progress.seen = claim, seen
        before, progress.finding = progress.finding, finding
        verdict = None if finding is None else _verdict(claim, finding)
        if finding is not None and finding is not before:
            self._act(claim, finding)
        if finding is not None and verdict is not None and failure is None:
            self._follow(claim, progress, finding, verdict)
        if verdict is None or finding is None:
            progress.verdict = None
            self._report.put_pod(_report(claim, None, failure))
            self._take_back(claim)
        elif _may_pass(finding, before) or _is_early(claim, verdict, failure):
            if claim.uid not in self._report.pods:
                self._report.put_pod(_report(claim, None, failure))
        else:
            progress.verdict = verdict
            self._report.put_pod(_report(claim, verdict, failure))
            self._say(claim, verdict.condition)

    def _act(self, claim: ClaimHere, finding: Finding) -> None:
        """Report to libvirt and to users what was set, and what differed."""
        if finding.pins is not None:
            self._pins.put(claim.uid, (finding.pid, finding.pins))
        if not finding.drift:
            return
        repaired = not set(finding.drift) & set(finding.differences)
        metrics.DRIFTS.labels("repaired" if repaired else "given-up" if finding.given_up else "left").inc()
        words = differences_in_words(finding.drift)
        log.warning("pod %s/%s: %s", claim.namespace, claim.pod, words, extra={"uid": claim.uid})
        pod = self._own.pods.get(claim.uid)
        regarding = [pod_reference(claim.namespace, claim.pod, claim.uid)]
        if pod is not None and pod.vmi:
            regarding.append(vmi_reference(pod.namespace, pod.vmi, pod.vmi_uid))
        for reference in regarding:
            self._events.record(pinning_drift(reference, words, repaired=repaired))

    def _follow(self, claim: ClaimHere, progress: _Progress, finding: Finding, verdict: Verdict) -> None:
        """Confirm a revision that every thread follows, and give one up that they cannot follow."""
        revision = claim.placement.revision
        if claim.confirmed >= revision or progress.moving is not None:
            return
        if progress.waits_for != revision:
            progress.waits_for, progress.since, progress.move_again_at = revision, self._clock(), 0.0
        if finding.follows and verdict.refusal is None:
            if revision > 1 and finding.pid:
                if self._clock() < progress.move_again_at:
                    return
                progress.moving = asyncio.create_task(self._move_memory(claim, progress, finding.pid))
            else:
                self._revisions.succeeded(claim.uid, claim.placement)
        elif self._clock() - progress.since >= REVISION_WITHIN_S:
            self._revisions.failed(claim.uid, verdict.drift)

    async def _move_memory(self, claim: ClaimHere, progress: _Progress, pid: int) -> None:
        try:
            if why := await self._revisions.move_memory(pid, claim.placement):
                log.warning("pod %s/%s: %s", claim.namespace, claim.pod, why, extra={"uid": claim.uid})
                progress.move_again_at = self._clock() + MEMORY_AGAIN_S
                self._revisions.failed(claim.uid, why)
            else:
                self._revisions.succeeded(claim.uid, claim.placement)
        finally:
            progress.moving = None
            self._wake.set()

    def _say(self, claim: ClaimHere, condition: Condition) -> None:
        pod = self._own.pods.get(claim.uid)
        if pod is not None and pod.condition(PINNED) != condition:
            self._conditions.put(claim.uid, condition)
        else:
            self._conditions.drop(claim.uid)  # what could not be written yet holds no more

    def _take_back(self, claim: ClaimHere) -> None:
        """No longer report a VM that has ended as pinned."""
        pod = self._own.pods.get(claim.uid)
        said = None if pod is None else pod.condition(PINNED)
        if said is not None and said.status:
            message = f"revision {claim.placement.revision}: its threads have ended"
            self._say(claim, Condition(PINNED, False, PinnedReason.NOT_RUNNING, message))

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


def _verdict(claim: ClaimHere, finding: Finding) -> Verdict | None:
    """Judge a finding; None while there is nothing to judge, because QEMU has not started."""
    target = claim.target
    if target.wanted.vm and not (finding.measured.threads or finding.problem or target.refusal):
        return None
    return Verdict(
        revision=claim.placement.revision,
        measured=finding.measured,
        differences=finding.differences,
        floats=claim.placement.placement.floats,
        given_up=finding.given_up,
        refusal=target.refusal,
        problem=finding.problem,
    )


def _may_pass(finding: Finding, before: Finding | None) -> bool:
    """Whether only a cpuset differs, and for the first time: it is being set right now."""
    return (
        bool(finding.differences)
        and all(isinstance(found, CpusetDifference) for found in finding.differences)
        and (before is None or before.differences != finding.differences)
    )


def _is_early(claim: ClaimHere, verdict: Verdict, failure: FailedRevision | None) -> bool:
    """Whether the cpuset that was found in order may still have the CPUs of the revision before."""
    return verdict.as_placed and failure is None and not claim.settled


def _report(claim: ClaimHere, verdict: Verdict | None, failure: FailedRevision | None) -> PodReport:
    return PodReport(
        uid=claim.uid,
        namespace=claim.namespace,
        pod=claim.pod,
        revision=0 if verdict is None else verdict.revision,
        pinned=verdict is not None and verdict.as_placed,
        running=True,
        failed_revision=0 if failure is None else failure.revision,
        restored_placement="" if failure is None else claim.placement.to_json(),
        cpus=NO_CPUS if verdict is None else verdict.measured.cpus,
        drift=failure.why if failure is not None else "" if verdict is None else verdict.drift,
    )
