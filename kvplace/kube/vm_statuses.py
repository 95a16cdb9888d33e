"""KubeVirt's own status of its VMs, for lists of VMs that opted in.

Of a VirtualMachine that is what `kubectl get vm` prints as its status, of a VirtualMachineInstance its phase.
Decisions need neither, so the caches of `serve` have none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from kvplace.core.annotations import read_options
from kvplace.core.errors import BadAnnotation
from kvplace.core.request import PinningOptions
from kvplace.kube.api_list_watch import Resource
from kvplace.kube.object_parts import ApiObject, Metadata
from kvplace.kube.session import path_of
from kvplace.kube.vm_progress import VMS_PATH
from kvplace.kube.watches import NAME_FIELD, NAMESPACE_FIELD, Kind

VmName: TypeAlias = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class VmStatus:
    """A VirtualMachine or a VirtualMachineInstance."""

    namespace: str
    name: str
    created: str = ""
    """When it was created, RFC 3339."""
    status: str = ""
    """In KubeVirt's word; empty before KubeVirt has reported anything."""
    is_instance: bool = False
    """Whether it is a VirtualMachineInstance."""
    options: PinningOptions | None = None
    """How it asks for cores; None if it does not, or in words that admission refuses."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels that its pod has, too."""

    @property
    def key(self) -> VmName:
        """The name of a VM and of its instance."""
        return self.namespace, self.name


class _ListedMeta(Metadata, frozen=True):
    annotations: dict[str, str] | None = None


class _Template(ApiObject, frozen=True):
    metadata: _ListedMeta | None = None


class _VmSpec(ApiObject, frozen=True):
    template: _Template | None = None


class _VmStatus(ApiObject, frozen=True):
    printable_status: str = ""


class _Vm(ApiObject, frozen=True):
    metadata: _ListedMeta
    spec: _VmSpec = _VmSpec()
    status: _VmStatus | None = None


class _VmiStatus(ApiObject, frozen=True):
    phase: str = ""


class _Vmi(ApiObject, frozen=True):
    metadata: _ListedMeta
    status: _VmiStatus | None = None


def _of_vm(vm: _Vm) -> VmStatus:
    template = (vm.spec.template and vm.spec.template.metadata) or _ListedMeta()
    said = vm.status.printable_status if vm.status is not None else ""
    return _status(vm.metadata, template, said, is_instance=False)


def _of_vmi(vmi: _Vmi) -> VmStatus:
    said = vmi.status.phase if vmi.status is not None else ""
    return _status(vmi.metadata, vmi.metadata, said, is_instance=True)


def _status(meta: _ListedMeta, asking: _ListedMeta, said: str, *, is_instance: bool) -> VmStatus:
    try:
        options = read_options(asking.annotations or {})
    except BadAnnotation:
        options = None
    labels = (asking.labels or {}) if options is not None else {}
    created = meta.creation_timestamp or ""
    return VmStatus(meta.namespace, meta.name, created, said, is_instance, options, labels)


def _kind(resource: str) -> Kind[VmName, VmStatus]:
    return Kind(
        resource,
        lambda record: record.key,
        {NAME_FIELD: lambda record: record.name, NAMESPACE_FIELD: lambda record: record.namespace},
    )


VM_STATUSES = _kind("virtualmachines")
VMI_STATUSES = _kind("virtualmachineinstances")
STATUS_RESOURCES: Mapping[Kind[Any, Any], Resource[Any]] = {
    VM_STATUSES: Resource.of(
        VM_STATUSES.name, path_of(*VMS_PATH, VM_STATUSES.name), msgspec.json.Decoder(_Vm), _of_vm
    ),
    VMI_STATUSES: Resource.of(
        VMI_STATUSES.name, path_of(*VMS_PATH, VMI_STATUSES.name), msgspec.json.Decoder(_Vmi), _of_vmi
    ),
}
