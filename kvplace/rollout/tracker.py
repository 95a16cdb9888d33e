"""The state of every VM of a rollout, and the VMs that are made next.

Watches and the run itself keep the state up to date. The stage of a VM follows from the objects behind it.
Times of a VM that this run makes count from the moment it was sent, by this process's clock. Times of other
VMs are the cluster's, in whole seconds. VMs are made in waves, with a limit on VMs in progress.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum

from kvplace.core.scalars import NodeName
from kvplace.core.vm_stages import VmStage
from kvplace.kube.api_errors import passes
from kvplace.kube.object_records import NO_NODE
from kvplace.kube.reported_vms import LauncherPod, ReportedVm
from kvplace.rollout.templates import Rollout, WantedVm

_DELETED = "it was deleted while the rollout ran"


class MakingState(Enum):
    """The part of a VM's state that waves need."""

    TO_MAKE = "to make"
    UNDER_WAY = "under way"
    READY = "ready"
    FAILED = "failed"

    @property
    def is_settled(self) -> bool:
        """Whether the state is final."""
        return self in (MakingState.READY, MakingState.FAILED)


def wave_ends(sizes: Sequence[int | str], total: int) -> tuple[int, ...]:
    """Return where each wave ends: the first number of VMs after it. The remaining VMs form the last wave."""
    ends: list[int] = []
    for size in sizes:
        before = ends[-1] if ends else 0
        vms = size if isinstance(size, int) else max(1, total * int(size.removesuffix("%")) // 100)
        if before + vms >= total:
            break
        ends.append(before + vms)
    return (*ends, total)


def due(
    statuses: Sequence[MakingState], ends: Sequence[int], max_in_flight: int, max_failures: int | None = None
) -> Iterator[int]:
    """Yield the numbers of the VMs that are made now, in order.

    A wave begins when every VM before it is ready or has failed.
    """
    if max_failures is not None and statuses.count(MakingState.FAILED) >= max_failures:
        return
    room = max_in_flight - statuses.count(MakingState.UNDER_WAY)
    for number, status in enumerate(statuses[: _open_until(statuses, ends)]):
        if room <= 0:
            return
        if status is MakingState.TO_MAKE:
            room -= 1
            yield number


def _open_until(statuses: Sequence[MakingState], ends: Sequence[int]) -> int:
    for end in ends:
        if not all(status.is_settled for status in statuses[:end]):
            return end
    return ends[-1]


@dataclass(frozen=True, slots=True)
class Observed:
    """The cluster's report about a VM at one moment."""

    stage: VmStage | None = None
    """None while it does not exist."""
    seconds: dict[VmStage, float] = field(default_factory=dict)
    """How long after its creation it reached each stage, by the clocks of the cluster, in whole seconds."""
    node: NodeName = NO_NODE
    failure: str = ""
    """Why it will come no further by itself."""
    hindrance: str = ""
    """Why it comes no further now; it may pass by itself, and KubeVirt tries again."""
    waiting: str = ""
    """The cause that its next stage waits for, where it is known."""
    has_ended: bool = False
    """Whether its guest has shut down by itself."""
    measured: tuple[float | None, str] | None = None
    """The last report of an agent: since when it is pinned, or why it is not; None without a report."""


ABSENT = Observed()


def observe(
    kind: str, vm: ReportedVm | None, vmi: ReportedVm | None, pods: Iterable[LauncherPod]
) -> Observed:
    """Combine the objects of a VM that was made from a manifest of this kind."""
    made = vm if kind == "VirtualMachine" else vmi
    if made is None:
        return ABSENT
    phase = "" if vmi is None else vmi.status
    has_ended = phase == "Succeeded"
    pod = _pod(pods, has_ended=has_ended)
    unmade = _unmade(vm, vmi, pod)
    is_passing = passes(unmade)
    reached: dict[VmStage, float | None] = {VmStage.CREATED: made.created_s}
    if pod is not None and pod.node:
        reached[VmStage.BOUND] = pod.bound_since
    if vmi is not None and phase in ("Running", "Succeeded"):
        reached.setdefault(VmStage.BOUND, vmi.running_since)
        reached[VmStage.RUNNING] = vmi.running_since
        if pod is not None and (pod.pinned_since is not None or (has_ended and pod.was_pinned)):
            reached[VmStage.PINNED] = pod.pinned_since
    return Observed(
        max(reached, key=lambda stage: stage.rank),
        {stage: max(0.0, at - made.created_s) for stage, at in reached.items() if at is not None},
        NO_NODE if pod is None else pod.node,
        _failure(made, vmi) or ("" if is_passing else unmade),
        unmade if is_passing else "",
        _waiting(vmi, pod),
        has_ended,
        _measured(pod),
    )


def _pod(pods: Iterable[LauncherPod], *, has_ended: bool) -> LauncherPod | None:
    """Return the pod that counts: while a VM migrates there are two. With the guest its pod ends, too."""
    found = [pod for pod in pods if not pod.deleting and (has_ended or not pod.has_ended)]
    return max(
        found,
        key=lambda pod: (
            pod.pinned_since is not None,
            has_ended and pod.was_pinned,
            bool(pod.node),
            pod.name,
        ),
        default=None,
    )


def _measured(pod: LauncherPod | None) -> tuple[float | None, str] | None:
    if pod is None or (pod.pinned_since is None and not pod.unpinned):
        return None
    return pod.pinned_since, pod.unpinned


def _failure(made: ReportedVm, vmi: ReportedVm | None) -> str:
    if made.deleting:
        return "it is being deleted"
    if vmi is not None and vmi.status == "Failed":
        return f"KubeVirt reports that it failed: {vmi.failure or 'no reason given'}"
    return ""


def _unmade(vm: ReportedVm | None, vmi: ReportedVm | None, pod: LauncherPod | None) -> str:
    """State why KubeVirt cannot make the next object; empty where it can."""
    if vmi is None:
        return "" if vm is None else vm.unmade
    return vmi.unmade if pod is None else ""


def _waiting(vmi: ReportedVm | None, pod: LauncherPod | None) -> str:
    if pod is not None and not pod.node and pod.waiting:
        return pod.waiting
    if vmi is not None and vmi.status != "Running":
        return vmi.failure
    return "" if pod is None or pod.pinned_since is not None else pod.unpinned


@dataclass(slots=True)
class TrackedVm:
    """One VM: its objects, and its stage."""

    wanted: WantedVm
    unmeasured: AbstractSet[NodeName]
    """The nodes where no agent measures."""
    vm: ReportedVm | None = None
    vmi: ReportedVm | None = None
    pods: dict[str, LauncherPod] = field(default_factory=dict)
    observed: Observed = ABSENT
    sent_at: float | None = None
    """When this run sent it; None when another run did, or none yet."""
    is_stored: bool = False
    """Whether the API server has stored it; the watch delivers it a moment later."""
    refusal: str = ""
    """Why it could not be made."""
    obstacle: str = ""
    """Why the API server did not take it when it was sent last."""
    hindered_since: float | None = None
    """Since when KubeVirt cannot make its next object, which may pass."""
    is_given_up: bool = False
    """Whether that has lasted too long."""
    was_seen: bool = False
    seconds: dict[VmStage, float] = field(default_factory=dict)
    """How long it took to reach each stage."""

    @property
    def stage(self) -> VmStage | None:
        """How far it has come; None while it does not exist."""
        if self.observed.stage is None and self.is_stored and not self.was_seen:
            return VmStage.CREATED
        return self.observed.stage

    @property
    def goal(self) -> VmStage:
        """The last stage that it can be seen to reach."""
        wanted = self.wanted.goal
        is_last = wanted is VmStage.PINNED and self.observed.node in self.unmeasured
        return VmStage.RUNNING if is_last else wanted

    @property
    def waiting(self) -> str:
        """The cause that its next stage waits for; empty where unknown."""
        if self.stage is None:
            return self.obstacle
        if self.observed.hindrance:
            return self.observed.hindrance
        if self.observed.waiting or self.stage is not VmStage.RUNNING or self.goal is not VmStage.PINNED:
            return self.observed.waiting
        return f"the agent of node {self.observed.node} has not reported yet whether it is pinned"

    @property
    def failure(self) -> str:
        """Why it will come no further; empty while it may."""
        if self.observed.stage is None:
            return _DELETED if self.was_seen else self.refusal
        if self.observed.has_ended and not self.is_ready:
            return f"its guest shut down before it was {self.goal.value}"
        return self.observed.failure or (self.observed.hindrance if self.is_given_up else "")

    @property
    def is_ready(self) -> bool:
        """Whether it has reached its goal."""
        stage = self.stage
        return stage is not None and stage.includes(self.goal)

    @property
    def status(self) -> MakingState:
        if self.failure:
            return MakingState.FAILED
        if self.is_ready:
            return MakingState.READY
        return (
            MakingState.TO_MAKE
            if self.observed.stage is None and self.sent_at is None
            else MakingState.UNDER_WAY
        )


class Tracker:
    """All VMs of a rollout."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called after every report about any VM."""
        self.unmeasured: set[NodeName] = set()
        """Nodes where VMs are ready when they run, until an agent measures a VM there again."""
        self.vms = {vm.name: TrackedVm(vm, self.unmeasured) for vm in rollout.vms}
        self._clock = clock
        self._on_change = on_change

    def lose_patience(self, patience_s: float) -> float:
        """Give up the VMs that have been hindered for so long; returns when the next one will be."""
        now, ends = self._clock(), math.inf
        for vm in self.vms.values():
            if vm.hindered_since is not None and not vm.is_given_up:
                end = vm.hindered_since + patience_s
                vm.is_given_up = end <= now
                ends = ends if vm.is_given_up else min(ends, end)
        return ends

    def vm_changed(self, before: ReportedVm | None, after: ReportedVm | None) -> None:
        """Take in a VirtualMachine."""
        tracked = self._of(before, after)
        if tracked is not None:
            tracked.vm = after
            self._observe(tracked)

    def vmi_changed(self, before: ReportedVm | None, after: ReportedVm | None) -> None:
        """Take in a VirtualMachineInstance."""
        tracked = self._of(before, after)
        if tracked is not None:
            tracked.vmi = after
            self._observe(tracked)

    def pod_changed(self, before: LauncherPod | None, after: LauncherPod | None) -> None:
        """Take in a pod of a VM."""
        either = after or before
        tracked = None if either is None else self.vms.get(either.vmi)
        if tracked is None or either is None:
            return
        if after is None:
            tracked.pods.pop(either.uid, None)
        else:
            tracked.pods[either.uid] = after
        self._observe(tracked)

    def _of(self, before: ReportedVm | None, after: ReportedVm | None) -> TrackedVm | None:
        either = after or before
        return None if either is None else self.vms.get(either.name)

    def _observe(self, tracked: TrackedVm) -> None:
        observed = observe(tracked.wanted.template.kind, tracked.vm, tracked.vmi, tracked.pods.values())
        if observed.measured is not None and observed.measured != tracked.observed.measured:
            self.unmeasured.discard(observed.node)
        tracked.observed = observed
        if not observed.hindrance:
            tracked.hindered_since, tracked.is_given_up = None, False
        elif tracked.hindered_since is None:
            tracked.hindered_since = self._clock()
        if observed.stage is not None:
            tracked.was_seen = True
            for stage in VmStage:
                if observed.stage.includes(stage) and stage not in tracked.seconds:
                    self._reached(tracked, stage, observed.seconds)
        self._on_change()

    def _reached(self, tracked: TrackedVm, stage: VmStage, seconds: Mapping[VmStage, float]) -> None:
        if tracked.sent_at is not None:
            tracked.seconds[stage] = self._clock() - tracked.sent_at
        elif stage in seconds:
            tracked.seconds[stage] = seconds[stage]
