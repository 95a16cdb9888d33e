"""How far one VM has come, from the objects behind it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvplace.core.scalars import NodeName
from kvplace.core.vm_stage import VmStage
from kvplace.kube.records import NO_NODE
from kvplace.kube.unanswered import passes
from kvplace.kube.vm_progress import LauncherPod, VmiObjectPhase, VmObject

_OVER = ("Succeeded", "Failed")


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
    """What its next stage waits for, where that is known."""
    has_ended: bool = False
    """Whether its guest has shut down by itself."""
    measured: tuple[float | None, str] | None = None
    """What an agent has reported last: since when it is pinned, or why it is not; None when nothing."""


NOT_THERE = Observed()


def observe(
    kind: str, vm: VmObject | None, vmi: VmiObjectPhase | None, pods: Iterable[LauncherPod]
) -> Observed:
    """Combine the objects of a VM that was made from a manifest of this kind."""
    made = vm if kind == "VirtualMachine" else vmi
    if made is None:
        return NOT_THERE
    phase = "" if vmi is None else vmi.phase
    has_ended = phase == "Succeeded"
    pod = _pod(pods, has_ended=has_ended)
    unmade = _unmade(vm, vmi, pod)
    is_passing = passes(unmade)
    reached: dict[VmStage, float | None] = {VmStage.CREATED: made.created}
    if pod is not None and pod.node:
        reached[VmStage.BOUND] = pod.bound_since
    if vmi is not None and phase in ("Running", "Succeeded"):
        reached.setdefault(VmStage.BOUND, vmi.running_since)
        reached[VmStage.RUNNING] = vmi.running_since
        if pod is not None and (pod.pinned_since is not None or (has_ended and pod.was_pinned)):
            reached[VmStage.PINNED] = pod.pinned_since
    return Observed(
        max(reached, key=lambda stage: stage.rank),
        {stage: max(0.0, at - made.created) for stage, at in reached.items() if at is not None},
        NO_NODE if pod is None else pod.node,
        _failure(made, vmi) or ("" if is_passing else unmade),
        unmade if is_passing else "",
        _waiting(vmi, pod),
        has_ended,
        _measured(pod),
    )


def _pod(pods: Iterable[LauncherPod], *, has_ended: bool) -> LauncherPod | None:
    """Return the pod that counts: while a VM migrates there are two. With the guest its pod ends, too."""
    found = [pod for pod in pods if not pod.deleting and (has_ended or pod.phase not in _OVER)]
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


def _failure(made: VmObject | VmiObjectPhase, vmi: VmiObjectPhase | None) -> str:
    if made.deleting:
        return "it is being deleted"
    if vmi is not None and vmi.phase == "Failed":
        return f"KubeVirt reports that it failed: {vmi.failure or 'no reason given'}"
    return ""


def _unmade(vm: VmObject | None, vmi: VmiObjectPhase | None, pod: LauncherPod | None) -> str:
    """State why KubeVirt cannot make the next object; empty where it can."""
    if vmi is None:
        return "" if vm is None else vm.failure
    return vmi.unmade if pod is None else ""


def _waiting(vmi: VmiObjectPhase | None, pod: LauncherPod | None) -> str:
    if pod is not None and not pod.node and pod.waiting:
        return pod.waiting
    if vmi is not None and vmi.phase != "Running":
        return vmi.failure
    return "" if pod is None or pod.pinned_since is not None else pod.unpinned
