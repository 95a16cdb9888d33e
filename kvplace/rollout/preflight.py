"""Checks before a rollout makes its first VM: names that are taken, quotas, rights, templates.

Every mistake that can be known beforehand is one sentence then, with nothing made. Templates are checked by
the API server itself, by a dry run of one VM of each, unless some VM of it has been made already.

All VMs of one template would share its disks, addresses and ids, though each needs its own. A template that
was read from a cluster has the disks of that VM, and its MAC addresses and UUID where KubeVirt or another
client has written them into it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, TypeVar

import msgspec

from kvplace.core.errors import Forbidden, KvplaceError, Misconfigured, Refused
from kvplace.core.quantity import counted, format_bytes
from kvplace.core.strict_json import shown
from kvplace.core.well_known_names import ROLLOUT_LABEL
from kvplace.kube.api_errors import NotFound, Rejected
from kvplace.kube.api_rollouts import Quota
from kvplace.kube.reported_vms import LAUNCHERS, VMI_PHASES, VMS, LauncherPod, ReportedVm
from kvplace.kube.watches import EVERYTHING, Kind, Selector, WatchEvent
from kvplace.rollout.templates import Rollout, WantedVm

_T = TypeVar("_T", bound=msgspec.Struct)
_K = TypeVar("_K")
_R = TypeVar("_R")

_SHOWN_NAMES = 3
_NO_DRY_RUN = "does not support dry run"
"""Part of the API server's message about a webhook with side effects, which a dry run does not call."""
_MEMORY = ("requests.memory", "memory")
"""Two names of one resource of quotas."""


class RolloutCluster(Protocol):
    """The cluster calls of a rollout: VMs, and the documents of rollouts. `kube.api_rollouts` answers."""

    def watch(self, kind: Kind[_K, _R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[_R]]: ...

    async def read_all(self, kind: Kind[_K, _R], selector: Selector = EVERYTHING) -> tuple[_R, ...]: ...

    async def apply_vm(self, vm: Mapping[str, Any], *, dry_run: bool = False) -> None: ...

    async def delete_vm(self, kind: str, namespace: str, name: str, uid: str) -> None: ...

    async def read_documents(self, namespace: str, rollout: str = "") -> Mapping[str, str]: ...

    async def store_document(self, namespace: str, rollout: str, text: str) -> None: ...

    async def delete_document(self, namespace: str, rollout: str) -> None: ...

    async def read_quotas(self, namespace: str) -> tuple[Quota, ...]: ...


class _Part(msgspec.Struct, frozen=True, rename="camel"):
    """Fields as KubeVirt spells them; `null` means the same as a missing field."""


class _TemplateMetadata(_Part, frozen=True):
    name: str | None = None


class _DataVolumeTemplate(_Part, frozen=True):
    metadata: _TemplateMetadata | None = None


class _DataVolume(_Part, frozen=True):
    name: str | None = None


class _Claim(_Part, frozen=True):
    claim_name: str | None = None
    read_only: bool | None = None


class _Volume(_Part, frozen=True):
    name: str | None = None
    persistent_volume_claim: _Claim | None = None
    data_volume: _DataVolume | None = None


class _Disk(_Part, frozen=True):
    name: str | None = None
    cdrom: dict[str, Any] | None = None


class _Interface(_Part, frozen=True):
    name: str | None = None
    mac_address: str | None = None


class _Devices(_Part, frozen=True):
    disks: list[_Disk] | None = None
    interfaces: list[_Interface] | None = None


class _Firmware(_Part, frozen=True):
    uuid: str | None = None
    serial: str | None = None


class _TemplateDomain(_Part, frozen=True):
    devices: _Devices | None = None
    firmware: _Firmware | None = None


class _VmiSpec(_Part, frozen=True):
    domain: _TemplateDomain | None = None
    volumes: list[_Volume] | None = None


class _VmiTemplate(_Part, frozen=True):
    spec: _VmiSpec | None = None


class _TemplateVmSpec(_Part, frozen=True):
    template: _VmiTemplate | None = None
    data_volume_templates: list[_DataVolumeTemplate] | None = None


def data_volumes(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the DataVolumes that KubeVirt makes for the first VM, and that the others would take from it."""
    spec = (
        _read(content["spec"], _TemplateVmSpec) if content["kind"] == "VirtualMachine" else _TemplateVmSpec()
    )
    found = (one.metadata.name if one.metadata else None for one in spec.data_volume_templates or ())
    return tuple(name for name in found if name)


def common_parts(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the other fields that the VMs would share, in words for people."""
    spec: _VmiSpec | None
    if content["kind"] == "VirtualMachine":
        template = _read(content["spec"], _TemplateVmSpec).template
        spec = template.spec if template else None
    else:
        spec = _read(content["spec"], _VmiSpec)
    return () if spec is None else tuple(_parts(spec))


def _parts(spec: _VmiSpec) -> Iterator[str]:
    domain = spec.domain or _TemplateDomain()
    devices, firmware = domain.devices or _Devices(), domain.firmware or _Firmware()
    read_only = {disk.name for disk in devices.disks or () if disk.cdrom is not None}
    for volume in spec.volumes or ():
        claim, data_volume = volume.persistent_volume_claim, volume.data_volume
        if volume.name in read_only:
            continue
        if claim is not None and claim.claim_name and not claim.read_only:
            yield f"PersistentVolumeClaim {claim.claim_name}"
        if data_volume is not None and data_volume.name:
            yield f"DataVolume {data_volume.name}"
    for interface in devices.interfaces or ():
        if interface.mac_address:
            yield f"MAC address {interface.mac_address}"
    if firmware.uuid:
        yield f"firmware UUID {firmware.uuid}"
    if firmware.serial:
        yield f"firmware serial number {firmware.serial}"


def _read(content: object, kind: type[_T]) -> _T:
    """Read the fields that this module needs; the API server refuses wrong shapes."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError:
        return kind()


@dataclass(frozen=True, slots=True)
class Found:
    """The objects of a rollout that exist already."""

    vms: tuple[ReportedVm, ...]
    vmis: tuple[ReportedVm, ...]
    pods: tuple[LauncherPod, ...]


async def look(cluster: RolloutCluster, rollout: Rollout) -> Found:
    """Read the present VMs of a rollout; raises Refused when another client's VM has one of its names."""
    everything = Selector(namespace=rollout.namespace)
    try:
        vms = await cluster.read_all(VMS, everything)
        vmis = await cluster.read_all(VMI_PHASES, everything)
    except NotFound as error:
        raise Misconfigured(
            "the cluster serves no VirtualMachines: install KubeVirt, or choose another cluster"
        ) from error
    # The instance of a VirtualMachine belongs to the VM's rollout, also with other labels.
    rollouts = {one.name: one.rollout for one in vmis} | {one.name: one.rollout for one in vms}
    foreign = {
        name: owner for name, owner in rollouts.items() if name in rollout.by_name and owner != rollout.name
    }
    if foreign:
        raise Refused(_taken(rollout, foreign))
    pods = await cluster.read_all(
        LAUNCHERS, Selector({ROLLOUT_LABEL: rollout.name}, namespace=rollout.namespace)
    )
    return Found(
        tuple(one for one in vms if one.rollout == rollout.name),
        tuple(one for one in vmis if one.rollout == rollout.name),
        pods,
    )


async def check(cluster: RolloutCluster, rollout: Rollout, missing: Sequence[WantedVm]) -> tuple[str, ...]:
    """Check that the `missing` VMs of a rollout can be made; raises Misconfigured or Refused.

    Returns sentences about what seems wrong and what could not be checked.
    """
    doubts = _in_common(rollout, missing)
    unmade = {vm.name for vm in missing}
    proved = {id(vm.template) for vm in rollout.vms if vm.name not in unmade}
    by_template: dict[int, list[WantedVm]] = {}
    for vm in missing:
        if id(vm.template) not in proved:
            by_template.setdefault(id(vm.template), []).append(vm)
    tried = [await _dry_run(cluster, rollout, vms[0], vms[-1]) for vms in by_template.values()]
    doubts += tuple(filter(None, tried))
    try:
        quotas = await cluster.read_quotas(rollout.namespace)
    except Forbidden:
        return (
            *doubts,
            f"you may not list the resourcequotas of namespace {rollout.namespace}: none is checked",
        )
    problem = quota_problem(quotas, missing)
    if problem is not None:
        raise Refused(f"namespace {rollout.namespace}: {problem}; raise the quota, or roll out fewer")
    return doubts


def _in_common(rollout: Rollout, missing: Sequence[WantedVm]) -> tuple[str, ...]:
    """State the fields that several VMs would share by mistake; raises Misconfigured for disks."""
    number = Counter(id(vm.template) for vm in rollout.vms)
    several = {id(vm.template): vm for vm in reversed(missing) if number[id(vm.template)] > 1}
    doubts = []
    for key, vm in several.items():
        vms = f"all {number[key]} VMs of the template of {vm.name}"
        if names := data_volumes(vm.template.content):
            raise Misconfigured(
                f"{vms} would use the disk of one, DataVolume {names[0]} of spec.dataVolumeTemplates; "
                "write one template for each VM, or use disks that KubeVirt makes anew, such as containerDisk"
            )
        doubts += [f"{vms} have the same {part}" for part in common_parts(vm.template.content)]
    return tuple(doubts)


def quota_problem(quotas: Iterable[Quota], vms: Sequence[WantedVm]) -> str | None:
    """State which quota the VMs would exceed; None when none that can be foretold."""
    wanted = _wanted(vms)
    for quota in quotas:
        for resource, amount in wanted.items():
            left = quota.left(resource)
            if left is not None and amount > left:
                is_bytes = resource in _MEMORY
                need = format_bytes(int(amount)) if is_bytes else str(amount)
                rest = format_bytes(max(0, int(left))) if is_bytes else str(left)
                return f"quota {quota.name} has {rest} of {resource} left, and the VMs need {need}"
    return None


def _wanted(vms: Sequence[WantedVm]) -> dict[str, Fraction]:
    """Count the resources of the VMs, without QEMU's overhead."""
    kinds = Counter(vm.template.kind for vm in vms)
    started = [vm.template for vm in vms if not vm.template.stays_off]
    amounts = {
        "count/virtualmachines.kubevirt.io": kinds["VirtualMachine"],
        "count/virtualmachineinstances.kubevirt.io": len(started),
        "count/pods": len(started),
        "pods": len(started),
        **dict.fromkeys(_MEMORY, sum(template.pod_memory for template in started)),
    }
    return {resource: Fraction(amount) for resource, amount in amounts.items() if amount}


async def _dry_run(cluster: RolloutCluster, rollout: Rollout, vm: WantedVm, other: WantedVm) -> str:
    """Try one VM of a template; where it is refused also the `other`: a policy may refuse single names.

    Returns why it could not be tried, empty where it could.
    """
    try:
        await cluster.apply_vm(rollout.manifest(vm), dry_run=True)
    except NotFound as error:
        if "namespaces" in str(error):
            raise Misconfigured(
                f"there is no namespace {rollout.namespace}; create it, or choose another one with -n"
            ) from error
        raise Misconfigured(
            f"the cluster serves no {vm.template.kind} ({error}); install KubeVirt, or choose another cluster"
        ) from error
    except (Rejected, Forbidden) as error:
        if _NO_DRY_RUN in str(error):
            return f"the template of {vm.name} could not be tried: {error}"
        if other is not vm:
            with contextlib.suppress(KvplaceError):
                await cluster.apply_vm(rollout.manifest(other), dry_run=True)
                return ""
        if isinstance(error, Forbidden):
            raise
        raise Misconfigured(f"the template of {vm.name} is refused: {error}") from error
    return ""


def _taken(rollout: Rollout, foreign: dict[str, str]) -> str:
    names = sorted(foreign)
    listed = ", ".join(
        f"{name} (of rollout {foreign[name]})" if foreign[name] else name for name in names[:_SHOWN_NAMES]
    )
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return (
        f"{counted(len(names), 'VM')} of these names in namespace {rollout.namespace} "
        f"{'is' if len(names) == 1 else 'are'} not of rollout {shown(rollout.name)}: {listed}{more}; "
        "choose another name, or delete them"
    )
