"""Checks before a rollout makes its first VM: names that are taken, quotas, rights, templates.

Every mistake that can be known beforehand is reported in one sentence, before a VM is created. The API server
itself checks each template by a dry run of one VM, unless a VM of the template exists already.

All VMs of one template would share its disks, addresses and ids, though each needs its own. A template from a
cluster has the disks of its VM, and often also MAC addresses and a UUID that KubeVirt has written.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol, TypeVar

from kvplace.core.errors import Forbidden, KvplaceError, Misconfigured, Refused
from kvplace.core.quantity import counted, first_of, format_bytes
from kvplace.core.strict_json import shown
from kvplace.core.well_known_names import ROLLOUT_LABEL
from kvplace.kube.api_errors import NotFound, Rejected
from kvplace.kube.api_rollouts import Quota
from kvplace.kube.object_client import at, items_at
from kvplace.kube.reported_vms import LAUNCHERS, VMI_PHASES, VMS
from kvplace.kube.watches import EVERYTHING, Kind, Selector, WatchEvent
from kvplace.rollout.templates import Rollout, WantedVm
from kvplace.rollout.tracker import Tracker

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


def data_volumes(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the DataVolumes that KubeVirt makes for the first VM, and that the others would take from it."""
    names = (at(one, "metadata", "name") for one in items_at(content, "spec", "dataVolumeTemplates"))
    return tuple(str(name) for name in names if name)


def common_parts(content: Mapping[str, Any]) -> Iterator[str]:
    """Name the other fields that the VMs would share, in words for people."""
    spec = at(content, *(("spec", "template") if content["kind"] == "VirtualMachine" else ()), "spec")
    disks = items_at(spec, "domain", "devices", "disks")
    read_only = {disk.get("name") for disk in disks if disk.get("cdrom") is not None}
    for volume in items_at(spec, "volumes"):
        if volume.get("name") in read_only:
            continue
        claim, data_volume = volume.get("persistentVolumeClaim"), at(volume, "dataVolume", "name")
        if (name := at(claim, "claimName")) and not at(claim, "readOnly"):
            yield f"PersistentVolumeClaim {name}"
        if data_volume:
            yield f"DataVolume {data_volume}"
    for interface in items_at(spec, "domain", "devices", "interfaces"):
        if address := interface.get("macAddress"):
            yield f"MAC address {address}"
    for key, noun in (("uuid", "UUID"), ("serial", "serial number")):
        if value := at(spec, "domain", "firmware", key):
            yield f"firmware {noun} {value}"


async def find_present(cluster: RolloutCluster, rollout: Rollout) -> Tracker:
    """Read the state of a rollout's VMs; raises Refused when another client's VM has one of its names."""
    everything, tracker = Selector(namespace=rollout.namespace), Tracker(rollout)
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
        name: owner for name, owner in rollouts.items() if name in tracker.vms and owner != rollout.name
    }
    if foreign:
        raise Refused(_taken(rollout, foreign))
    pods = await cluster.read_all(
        LAUNCHERS, Selector({ROLLOUT_LABEL: rollout.name}, namespace=rollout.namespace)
    )
    for vm in vms:
        if vm.rollout == rollout.name:
            tracker.vm_changed(None, vm)
    for vmi in vmis:
        if vmi.rollout == rollout.name:
            tracker.vmi_changed(None, vmi)
    for pod in pods:
        tracker.pod_changed(None, pod)
    return tracker


async def check(cluster: RolloutCluster, rollout: Rollout, missing: Sequence[WantedVm]) -> tuple[str, ...]:
    """Check that the `missing` VMs of a rollout can be made; raises Misconfigured or Refused.

    Returns sentences about likely mistakes and about checks that were not possible.
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
    """Name the quota that the VMs would exceed; None where no quota seems too small."""
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
    names = [f"{name} (of rollout {owner})" if owner else name for name, owner in sorted(foreign.items())]
    return (
        f"{counted(len(names), 'VM')} of these names in namespace {rollout.namespace} "
        f"{'is' if len(names) == 1 else 'are'} not of rollout {shown(rollout.name)}: "
        f"{first_of(names, _SHOWN_NAMES)}; choose another name, or delete them"
    )
