"""How far VMs have come, read from the three objects behind each of them: VM, VMI and virt-launcher pod.

Records of their own, because the caches of `serve` need none of these fields for thousands of pods. What a
moment cannot be read from is None, and so is what has not happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial

import msgspec

from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import NO_LONGER_RUNNING, PINNED
from kvplace.kube.api_list_watch import Resource
from kvplace.kube.object_parts import ApiObject, ConditionObject
from kvplace.kube.object_records import NO_NODE
from kvplace.kube.pod_spec import OwnerReference
from kvplace.kube.session import path_of
from kvplace.kube.watches import NAME_FIELD, NAMESPACE_FIELD, Kind

VMS_PATH = ("apis", "kubevirt.io", "v1")
_NOT_MADE = "FailedCreate"
_REASONS_OF_WAITING = ("Unschedulable", "SchedulerError")


@dataclass(frozen=True, slots=True)
class VmObject:
    """A VirtualMachine."""

    namespace: str
    name: str
    uid: str
    created: float
    """When it was stored, in seconds since 1970."""
    rollout: str = ""
    """Value of its label kvplace.io/rollout."""
    deleting: bool = False
    failure: str = ""
    """Why virt-controller cannot make its VMI, in virt-controller's words."""


@dataclass(frozen=True, slots=True)
class VmiObjectPhase:
    """A VirtualMachineInstance."""

    namespace: str
    name: str
    uid: str
    created: float
    rollout: str = ""
    deleting: bool = False
    phase: str = ""
    running_since: float | None = None
    failure: str = ""
    """Why it is not ready, in KubeVirt's words."""
    unmade: str = ""
    """Why virt-controller cannot make its pod, in virt-controller's words."""


@dataclass(frozen=True, slots=True)
class LauncherPod:
    """The pod that a VM runs in."""

    namespace: str
    name: str
    uid: str
    vmi: str
    """Name of its VMI."""
    rollout: str = ""
    deleting: bool = False
    phase: str = ""
    node: NodeName = NO_NODE
    bound_since: float | None = None
    waiting: str = ""
    """Why it has no node yet, in kube-scheduler's words."""
    pinned_since: float | None = None
    unpinned: str = ""
    """Why it is not pinned, in the agent's words."""
    was_pinned: bool = False
    """Whether it was pinned until its threads ended."""


class _Labels(ApiObject, frozen=True):
    rollout: str = msgspec.field(name="kvplace.io/rollout", default="")


class _Meta(ApiObject, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: _Labels | None = None
    owner_references: tuple[OwnerReference, ...] | None = None

    @property
    def rollout(self) -> str:
        return self.labels.rollout if self.labels is not None else ""

    @property
    def created(self) -> float:
        return _seconds(self.creation_timestamp) or 0.0


class _Condition(ConditionObject, frozen=True):
    last_transition_time: datetime | None = None


class _Transition(ApiObject, frozen=True):
    phase: str = ""
    phase_transition_timestamp: datetime | None = None


class _Status(ApiObject, frozen=True):
    phase: str = ""
    conditions: tuple[_Condition, ...] | None = None
    phase_transition_timestamps: tuple[_Transition, ...] | None = None

    def condition(self, kind: str) -> _Condition:
        return next((one for one in self.conditions or () if one.type == kind), _NO_CONDITION)


class _Spec(ApiObject, frozen=True):
    node_name: str = ""


class _Object(ApiObject, frozen=True):
    metadata: _Meta
    spec: _Spec = _Spec()
    status: _Status | None = None


_NO_CONDITION = _Condition()
_NO_STATUS = _Status()


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _vm(vm: _Object) -> VmObject:
    meta, status = vm.metadata, vm.status or _NO_STATUS
    failure = status.condition("Failure")
    return VmObject(
        meta.namespace,
        meta.name,
        meta.uid,
        meta.created,
        meta.rollout,
        meta.deletion_timestamp is not None,
        (failure.message or failure.reason) if failure.status == "True" else "",
    )


def _vmi(vmi: _Object) -> VmiObjectPhase:
    meta, status = vmi.metadata, vmi.status or _NO_STATUS
    ready, made = status.condition("Ready"), status.condition("Synchronized")
    ran = (one for one in status.phase_transition_timestamps or () if one.phase == "Running")
    return VmiObjectPhase(
        meta.namespace,
        meta.name,
        meta.uid,
        meta.created,
        meta.rollout,
        meta.deletion_timestamp is not None,
        status.phase,
        _seconds(next((one.phase_transition_timestamp for one in ran), None)),
        (ready.message or ready.reason) if ready.status == "False" else "",
        made.message if made.status == "False" and made.reason == _NOT_MADE else "",
    )


def _pod(pod: _Object) -> LauncherPod:
    meta, status = pod.metadata, pod.status or _NO_STATUS
    scheduled, pinned = status.condition("PodScheduled"), status.condition(PINNED)
    owner = next((one.name for one in meta.owner_references or () if one.is_vmi), "")
    is_pinned = pinned.status == "True"
    return LauncherPod(
        meta.namespace,
        meta.name,
        meta.uid,
        owner,
        meta.rollout,
        meta.deletion_timestamp is not None,
        status.phase,
        NodeName(pod.spec.node_name),
        _seconds(scheduled.last_transition_time) if pod.spec.node_name else None,
        scheduled.message if scheduled.reason in _REASONS_OF_WAITING else "",
        _seconds(pinned.last_transition_time) or 0.0 if is_pinned else None,
        "" if is_pinned else pinned.message,
        not is_pinned and pinned.reason == NO_LONGER_RUNNING,
    )


VMS: Kind[str, VmObject] = Kind(
    "virtualmachines",
    lambda record: record.name,
    {NAME_FIELD: lambda record: record.name, NAMESPACE_FIELD: lambda record: record.namespace},
)
"""VirtualMachines of one namespace, by name."""
VMI_PHASES: Kind[str, VmiObjectPhase] = Kind(
    "virtualmachineinstances",
    lambda record: record.name,
    {NAME_FIELD: lambda record: record.name, NAMESPACE_FIELD: lambda record: record.namespace},
)
"""VirtualMachineInstances of one namespace, by name."""
LAUNCHERS: Kind[str, LauncherPod] = Kind(
    "pods",
    lambda record: record.uid,
    {NAME_FIELD: lambda record: record.name, NAMESPACE_FIELD: lambda record: record.namespace},
)
"""Pods of VMs."""

_decoder = partial(msgspec.json.Decoder, _Object)
VM_RESOURCE = Resource.of("virtualmachines", path_of(*VMS_PATH, "virtualmachines"), _decoder(), _vm)
VMI_RESOURCE = Resource.of(
    "virtualmachineinstances", path_of(*VMS_PATH, "virtualmachineinstances"), _decoder(), _vmi
)
LAUNCHER_RESOURCE = Resource.of("pods", path_of("api", "v1", "pods"), _decoder(), _pod)
