"""VMs as KubeVirt reports them: the progress of each, and the status of VMs that opted in.

A rollout reads how far its VMs have come from three objects: VM, VMI and virt-launcher pod. A list of VMs
shows KubeVirt's own status: of a VirtualMachine the status that `kubectl get vm` prints, of a
VirtualMachineInstance its phase. Decisions need none of this, so the caches of `serve` do not have it for
thousands of pods. What a moment cannot be read from is None, and so is what has not happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias

import msgspec

from kvplace.core.annotations import read_options
from kvplace.core.errors import BadAnnotation
from kvplace.core.request import PinningOptions
from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import NO_LONGER_RUNNING, PINNED, ROLLOUT_LABEL
from kvplace.kube.api_list_watch import Resource
from kvplace.kube.object_parts import ApiObject, ConditionObject, Metadata
from kvplace.kube.object_records import NO_NODE
from kvplace.kube.pod_spec import OwnerReference
from kvplace.kube.session import path_of
from kvplace.kube.watches import NAME_FIELD, NAMESPACE_FIELD, Kind

VMS_PATH = ("apis", "kubevirt.io", "v1")
VmName: TypeAlias = tuple[str, str]
"""Namespace and name."""
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


@dataclass(frozen=True, slots=True)
class VmStatus:
    """A VirtualMachine or a VirtualMachineInstance."""

    namespace: str
    name: str
    created: str = ""
    """When it was created, RFC 3339."""
    status: str = ""
    """The word of KubeVirt; empty before KubeVirt has reported anything."""
    is_instance: bool = False
    """Whether it is a VirtualMachineInstance."""
    options: PinningOptions | None = None
    """How it requests cores; None if it does not, or in values that admission refuses."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels that its pod has, too."""

    @property
    def key(self) -> VmName:
        """The name of a VM and of its instance."""
        return self.namespace, self.name


class _Meta(Metadata, frozen=True):
    annotations: dict[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] | None = None

    @property
    def rollout(self) -> str:
        return (self.labels or {}).get(ROLLOUT_LABEL, "")

    @property
    def created(self) -> float:
        moment = self.creation_timestamp
        return 0.0 if moment is None else datetime.fromisoformat(moment).timestamp()


class _Condition(ConditionObject, frozen=True):
    last_transition_time: datetime | None = None


class _Transition(ApiObject, frozen=True):
    phase: str = ""
    phase_transition_timestamp: datetime | None = None


class _Status(ApiObject, frozen=True):
    phase: str = ""
    printable_status: str = ""
    conditions: tuple[_Condition, ...] | None = None
    phase_transition_timestamps: tuple[_Transition, ...] | None = None

    def condition(self, kind: str) -> _Condition:
        return next((one for one in self.conditions or () if one.type == kind), _NO_CONDITION)


class _Template(ApiObject, frozen=True):
    metadata: _Meta | None = None


class _Spec(ApiObject, frozen=True):
    node_name: str = ""
    template: _Template | None = None


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


def _status_of_vm(vm: _Object) -> VmStatus:
    template = (vm.spec.template and vm.spec.template.metadata) or _Meta()
    status = (vm.status or _NO_STATUS).printable_status
    return _vm_status(vm.metadata, template, status, is_instance=False)


def _status_of_vmi(vmi: _Object) -> VmStatus:
    status = (vmi.status or _NO_STATUS).phase
    return _vm_status(vmi.metadata, vmi.metadata, status, is_instance=True)


def _vm_status(meta: _Meta, asking: _Meta, status: str, *, is_instance: bool) -> VmStatus:
    try:
        options = read_options(asking.annotations or {})
    except BadAnnotation:
        options = None
    labels = (asking.labels or {}) if options is not None else {}
    created = meta.creation_timestamp or ""
    return VmStatus(meta.namespace, meta.name, created, status, is_instance, options, labels)


def _kind(resource: str) -> Kind[VmName, VmStatus]:
    return Kind(
        resource,
        lambda record: record.key,
        {NAME_FIELD: lambda record: record.name, NAMESPACE_FIELD: lambda record: record.namespace},
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
VM_STATUSES = _kind("virtualmachines")
VMI_STATUSES = _kind("virtualmachineinstances")
STATUS_RESOURCES: Mapping[Kind[Any, Any], Resource[Any]] = {
    VM_STATUSES: Resource.of(
        VM_STATUSES.name, path_of(*VMS_PATH, VM_STATUSES.name), _decoder(), _status_of_vm
    ),
    VMI_STATUSES: Resource.of(
        VMI_STATUSES.name, path_of(*VMS_PATH, VMI_STATUSES.name), _decoder(), _status_of_vmi
    ),
}
