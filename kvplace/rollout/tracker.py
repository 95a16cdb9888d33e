"""The state of every VM of a rollout, kept up to date by watches and by what the run itself does.

Times of a VM that this run makes count from the moment it was sent, by this process's clock. Those of others
are the cluster's, in whole seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvplace.core.scalars import NodeName
from kvplace.core.vm_stage import VmStage
from kvplace.kube.vm_progress import LauncherPod, VmiObjectPhase, VmObject
from kvplace.rollout.observed import NOT_THERE, Observed, observe
from kvplace.rollout.wanted import Rollout, WantedVm
from kvplace.rollout.waves import Status

_DELETED = "it was deleted while the rollout ran"


@dataclass(slots=True)
class TrackedVm:
    """One VM: its objects, and what follows from them."""

    wanted: WantedVm
    unmeasured: AbstractSet[NodeName]
    """The nodes where no agent measures."""
    vm: VmObject | None = None
    vmi: VmiObjectPhase | None = None
    pods: dict[str, LauncherPod] = field(default_factory=dict)
    observed: Observed = NOT_THERE
    sent_at: float | None = None
    """When this run sent it; None when another run did, or none yet."""
    is_stored: bool = False
    """Whether the API server has answered that it is stored; the watch reports it a moment later."""
    refusal: str = ""
    """Why it could not be made."""
    obstacle: str = ""
    """Why the API server did not take it when it was sent last."""
    hindered_since: float | None = None
    """Since when KubeVirt cannot make its next object, which may pass."""
    is_given_up: bool = False
    """Whether that has lasted too long."""
    was_there: bool = False
    seconds: dict[VmStage, float] = field(default_factory=dict)
    """How long it took to reach each stage."""

    @property
    def stage(self) -> VmStage | None:
        """How far it has come; None while it does not exist."""
        if self.observed.stage is None and self.is_stored and not self.was_there:
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
            return _DELETED if self.was_there else self.refusal
        if self.observed.has_ended and not self.is_there:
            return f"its guest shut down before it was {self.goal.value}"
        return self.observed.failure or (self.observed.hindrance if self.is_given_up else "")

    @property
    def is_there(self) -> bool:
        """Whether it has reached its goal."""
        stage = self.stage
        return stage is not None and stage.includes(self.goal)

    @property
    def status(self) -> Status:
        if self.failure:
            return Status.FAILED
        if self.is_there:
            return Status.THERE
        return Status.TO_MAKE if self.observed.stage is None and self.sent_at is None else Status.UNDER_WAY


class Tracker:
    """All VMs of a rollout."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called after every change of any VM."""
        self._unmeasured: set[NodeName] = set()
        self.vms = {vm.name: TrackedVm(vm, self._unmeasured) for vm in rollout.vms}
        self._clock = clock
        self._on_change = on_change

    def sends(self, name: str) -> None:
        """Note that a VM is sent now."""
        self.vms[name].sent_at = self._clock()

    def stored(self, name: str) -> None:
        """Note that the API server has stored a VM."""
        self.vms[name].is_stored = True
        self._on_change()

    def takes_back(self, name: str) -> None:
        """Note that a VM was not sent after all."""
        self.vms[name].sent_at = None

    def not_taken(self, name: str, why: str) -> None:
        """Note why the API server could not take a VM; it is sent again."""
        self.vms[name].obstacle = why

    def lose_patience(self, patience_s: float) -> float:
        """Give up the VMs that have been hindered for so long; returns when the next one will be."""
        now, ends = self._clock(), math.inf
        for vm in self.vms.values():
            if vm.hindered_since is not None and not vm.is_given_up:
                end = vm.hindered_since + patience_s
                vm.is_given_up = end <= now
                ends = ends if vm.is_given_up else min(ends, end)
        return ends

    def refused(self, name: str, why: str) -> None:
        """Note that a VM could not be made."""
        self.vms[name].refusal = why
        self._on_change()

    def nobody_measures(self, node: NodeName) -> None:
        """Note that VMs of a node come no further than running, until an agent measures one there again."""
        self._unmeasured.add(node)

    def vm_changed(self, before: VmObject | None, after: VmObject | None) -> None:
        """Take in a VirtualMachine."""
        either = after or before
        tracked = None if either is None else self.vms.get(either.name)
        if tracked is not None:
            tracked.vm = after
            self._look(tracked)

    def vmi_changed(self, before: VmiObjectPhase | None, after: VmiObjectPhase | None) -> None:
        """Take in a VirtualMachineInstance."""
        either = after or before
        tracked = None if either is None else self.vms.get(either.name)
        if tracked is not None:
            tracked.vmi = after
            self._look(tracked)

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
        self._look(tracked)

    def take_in(
        self, vms: Iterable[VmObject], vmis: Iterable[VmiObjectPhase], pods: Iterable[LauncherPod]
    ) -> None:
        """Take in lists that were read once."""
        for vm in vms:
            self.vm_changed(None, vm)
        for vmi in vmis:
            self.vmi_changed(None, vmi)
        for pod in pods:
            self.pod_changed(None, pod)

    def _look(self, tracked: TrackedVm) -> None:
        observed = observe(tracked.wanted.template.kind, tracked.vm, tracked.vmi, tracked.pods.values())
        if observed.measured is not None and observed.measured != tracked.observed.measured:
            self._unmeasured.discard(observed.node)
        tracked.observed = observed
        if not observed.hindrance:
            tracked.hindered_since, tracked.is_given_up = None, False
        elif tracked.hindered_since is None:
            tracked.hindered_since = self._clock()
        if observed.stage is not None:
            tracked.was_there = True
            for stage in VmStage:
                if observed.stage.includes(stage) and stage not in tracked.seconds:
                    self._reached(tracked, stage, observed.seconds)
        self._on_change()

    def _reached(self, tracked: TrackedVm, stage: VmStage, seconds: Mapping[VmStage, float]) -> None:
        if tracked.sent_at is not None:
            tracked.seconds[stage] = self._clock() - tracked.sent_at
        elif stage in seconds:
            tracked.seconds[stage] = seconds[stage]
