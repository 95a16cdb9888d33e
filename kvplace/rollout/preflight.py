"""Checks before a rollout makes its first VM: names that are taken, quotas, rights, templates.

Every mistake that can be known beforehand is one sentence then, with nothing made. Templates are checked by
the API server itself, by a dry run of one VM of each, unless some VM of it has been made already.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvplace.core.errors import Forbidden, KvplaceError, Misconfigured, Refused
from kvplace.core.marks import ROLLOUT_LABEL
from kvplace.core.quantity import counted, format_bytes
from kvplace.core.strict_json import shown
from kvplace.kube.api_errors import Missing, Rejected
from kvplace.kube.quotas import Quota
from kvplace.kube.vm_progress import LAUNCHERS, VMI_PHASES, VMS, LauncherPod, VmiObjectPhase, VmObject
from kvplace.kube.watches import Selector
from kvplace.rollout.common_parts import common_parts, data_volumes
from kvplace.rollout.port import RolloutCluster
from kvplace.rollout.wanted import Rollout, WantedVm

_SHOWN_NAMES = 3
_NO_DRY_RUN = "does not support dry run"
"""In what the API server reports of a webhook with side effects, which it then does not ask."""
_MEMORY = ("requests.memory", "memory")
"""Two names of one resource of quotas."""


@dataclass(frozen=True, slots=True)
class Found:
    """The objects of a rollout that exist already."""

    vms: tuple[VmObject, ...]
    vmis: tuple[VmiObjectPhase, ...]
    pods: tuple[LauncherPod, ...]


async def look(cluster: RolloutCluster, rollout: Rollout) -> Found:
    """Read what exists of a rollout; raises Refused when a VM of its names belongs to another client."""
    everything = Selector(namespace=rollout.namespace)
    try:
        vms = await cluster.read_all(VMS, everything)
        vmis = await cluster.read_all(VMI_PHASES, everything)
    except Missing as error:
        raise Misconfigured(
            "the cluster serves no VirtualMachines: install KubeVirt, or choose another cluster"
        ) from error
    # The instance of a VirtualMachine belongs to the VM's rollout, whatever labels it has.
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
    """State what several VMs would share though each needs its own; raises Misconfigured for disks."""
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
    """Count what the VMs take at least; QEMU's overhead comes on top."""
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
    except Missing as error:
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
