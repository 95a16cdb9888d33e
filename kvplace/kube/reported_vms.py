"""VMs as KubeVirt reports them: VirtualMachine, VirtualMachineInstance and virt-launcher pod.

A rollout reads the progress of its VMs from them, and a list of VMs the status. Decisions need none of this,
so the caches of `serve` do not hold it. A moment is None where it is unknown and where it has not come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeAlias

import msgspec

from kvplace.core.annotations import read_options
from kvplace.core.errors import BadAnnotation
from kvplace.core.request import PinningOptions
from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import NO_LONGER_RUNNING, PINNED, ROLLOUT_LABEL
from kvplace.kube.api_errors import NOT_JSON, unreadable
from kvplace.kube.api_records import RecordReader
from kvplace.kube.object_parts import ApiObject, ConditionObject, Metadata
from kvplace.kube.object_records import NO_NODE, qemu_has_ended
from kvplace.kube.objects import ContainerStatus, compute_of
from kvplace.kube.watches import KUBEVIRT, NAME_FIELD, NAMESPACE_FIELD, PODS, VMIS, ApiKind, Kind

VmName: TypeAlias = tuple[str, str]
"""Namespace and name."""
_NOT_MADE = "FailedCreate"
_REASONS_OF_WAITING = ("Unschedulable", "SchedulerError")


@dataclass(frozen=True, slots=True)
class ReportedVm:
    """A VirtualMachine or a VirtualMachineInstance."""

    namespace: str
    name: str
    uid: str = ""
    created: str = ""
    """When it was created, RFC 3339."""
    status: str = ""
    """As `kubectl get vm` prints it, or the phase of a VMI; empty before the first report."""
    is_instance: bool = False
    """Whether it is a VirtualMachineInstance."""
    options: PinningOptions | None = None
    """How it requests cores; None if it does not, or in values that admission refuses."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels that its pod has, too; empty without `options`."""
    rollout: str = ""
    """Value of its label kvplace.io/rollout."""
    deleting: bool = False
    unmade: str = ""
    """The error of virt-controller when it makes the VMI of a VM, or the pod of a VMI."""
    running_since: float | None = None
    """Of a VMI, like the next one; in seconds since 1970."""
    failure: str = ""
    """The reason of KubeVirt why a VMI is not ready."""

    @property
    def key(self) -> VmName:
        """The name of a VM and of its instance."""
        return self.namespace, self.name

    @property
    def created_s(self) -> float:
        """When it was created, in seconds since 1970."""
        return _seconds(self.created or None) or 0.0


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
    has_ended: bool = False
    """Whether its QEMU has ended by its status."""
    node: NodeName = NO_NODE
    bound_since: float | None = None
    waiting: str = ""
    """The reason of kube-scheduler why it has no node yet."""
    pinned_since: float | None = None
    unpinned: str = ""
    """The reason of the agent why it is not pinned."""
    was_pinned: bool = False
    """Whether it was pinned until its threads ended."""


class _Transition(ApiObject, frozen=True):
    phase: str = ""
    phase_transition_timestamp: str | None = None


class _Status(ApiObject, frozen=True):
    phase: str = ""
    printable_status: str = ""
    conditions: tuple[ConditionObject, ...] | None = None
    phase_transition_timestamps: tuple[_Transition, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None

    def condition(self, kind: str) -> ConditionObject:
        return next((one for one in self.conditions or () if one.type == kind), _NO_CONDITION)


class _Spec(ApiObject, frozen=True):
    node_name: str = ""
    template: _Object | None = None


class _Object(ApiObject, frozen=True):
    metadata: Metadata = Metadata()
    spec: _Spec = _Spec()
    status: _Status | None = None


_NO_CONDITION = ConditionObject()
_NO_STATUS = _Status()


def _seconds(moment: str | None) -> float | None:
    return None if moment is None else datetime.fromisoformat(moment).timestamp()


def _vm(vm: _Object) -> ReportedVm:
    template = vm.spec.template.metadata if vm.spec.template is not None else Metadata()
    status = vm.status or _NO_STATUS
    failure = status.condition("Failure")
    return replace(
        _reported_vm(vm.metadata, template),
        status=status.printable_status,
        unmade=(failure.message or failure.reason) if failure.status == "True" else "",
    )


def _vmi(vmi: _Object) -> ReportedVm:
    status = vmi.status or _NO_STATUS
    ready, made = status.condition("Ready"), status.condition("Synchronized")
    ran = (one for one in status.phase_transition_timestamps or () if one.phase == "Running")
    return replace(
        _reported_vm(vmi.metadata, vmi.metadata),
        status=status.phase,
        is_instance=True,
        unmade=made.message if made.status == "False" and made.reason == _NOT_MADE else "",
        running_since=_seconds(next((one.phase_transition_timestamp for one in ran), None)),
        failure=(ready.message or ready.reason) if ready.status == "False" else "",
    )


def reported_vmi(document: Mapping[str, Any]) -> ReportedVm:
    """Read a VirtualMachineInstance from its JSON; raises UnusableAnswer."""
    try:
        return _vmi(msgspec.convert(document, _Object))
    except (ValueError, *NOT_JSON) as error:
        raise unreadable(VMIS.name, error) from error


def _reported_vm(meta: Metadata, asking: Metadata) -> ReportedVm:
    """Read the metadata of a VM or VMI, and the request in the metadata of the VMI or its template."""
    try:
        options = read_options(asking.annotations or {})
    except BadAnnotation:
        options = None
    return ReportedVm(
        meta.namespace,
        meta.name,
        meta.uid,
        meta.creation_timestamp or "",
        options=options,
        labels=(asking.labels or {}) if options is not None else {},
        rollout=_rollout(meta),
        deleting=meta.deletion_timestamp is not None,
    )


def _rollout(meta: Metadata) -> str:
    return (meta.labels or {}).get(ROLLOUT_LABEL, "")


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
        _rollout(meta),
        meta.deletion_timestamp is not None,
        qemu_has_ended(
            status.phase, owner, compute_terminated=compute_of(status.container_statuses).has_terminated
        ),
        NodeName(pod.spec.node_name),
        _seconds(scheduled.last_transition_time) if pod.spec.node_name else None,
        scheduled.message if scheduled.reason in _REASONS_OF_WAITING else "",
        _seconds(pinned.last_transition_time) or 0.0 if is_pinned else None,
        "" if is_pinned else pinned.message,
        not is_pinned and pinned.reason == NO_LONGER_RUNNING,
    )


_BY_NAME: Mapping[str, Callable[[Any], str]] = {
    NAME_FIELD: lambda record: record.name,
    NAMESPACE_FIELD: lambda record: record.namespace,
}
VMS: Kind[VmName, ReportedVm] = Kind(
    ApiKind("virtualmachines", KUBEVIRT), lambda record: record.key, _BY_NAME
)
VMI_PHASES: Kind[VmName, ReportedVm] = Kind(VMIS.api, lambda record: record.key, _BY_NAME)
LAUNCHERS: Kind[str, LauncherPod] = Kind(PODS.api, lambda record: record.uid, _BY_NAME)
"""Pods of VMs."""

_DECODER = msgspec.json.Decoder(_Object)
VM_READERS: Mapping[Kind[Any, Any], RecordReader[Any]] = {
    VMS: RecordReader.of(_DECODER, _vm),
    VMI_PHASES: RecordReader.of(_DECODER, _vmi),
}
LAUNCHER_READER = RecordReader.of(_DECODER, _pod)
