"""Checks of the ledgers, and of the VMs with claims in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from kvplace.core.claim_changes import is_for_migration
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.ledger import Claim
from kvplace.core.quantity import counted
from kvplace.core.scalars import NO_CPUS, CpuMask, PodUid
from kvplace.doctor.installation import Finding, Installation, object_name, some, warning, wrong
from kvplace.kube.object_client import Document, at
from kvplace.nodes.cluster_view import NodeView, VmState, VmView
from kvplace.nodes.node_machine import Unusable

VMIS = "virtualmachineinstances"
_SHOWN = 5
_SETTLING = timedelta(minutes=2)
"""A claim may have no pod, and a VM no measurement, for this time."""
_EDIT = 'take it out with `kubectl edit nodeledger {}`; see first "Cores are not released" in Troubleshooting'


def suspects(found: Installation) -> frozenset[str]:
    """Return the UIDs of pods without their claim or their QEMU, and of claims and VMs without their pod.

    Each may be under way: lists are not read at the same moment, and a claim outlives its pod a little.
    """
    lost = (uid for node in found.view.nodes.values() for uid in _without_pods(found, node))
    unclaimed = (vm.pod.uid for vm in found.view.vms.values() if _lacks_claim(vm))
    unseen = (uid for vmi in found.of(VMIS) for uid in _unseen(found, vmi))
    held = (vm.pod.uid for vm in found.view.vms.values() if _is_held(vm))
    return frozenset({*lost, *unclaimed, *unseen, *held}) - found.cleared


def check_ledgers(found: Installation) -> Iterator[Finding]:
    """Check that every ledger can be read, belongs to a node, and does not contradict itself."""
    for node in found.view.nodes.values():
        record = node.ledger_record
        if record is None:
            continue
        about = f"NodeLedger {node.name}"
        if record.problem:
            yield wrong(about, f"it cannot be read: {record.problem}", _EDIT.format(node.name))
            continue
        if not node.exists:
            claims = counted(len(node.ledger.claims), "claim")
            yield warning(
                about,
                f"its node does not exist any more, and it has {claims}",
                "serve deletes it when the pods are gone: check that it runs, or delete the ledger then",
            )
            continue
        yield from _contradictions(about, node)
        lost = [
            claim.vm_name for uid, claim in _without_pods(found, node).items() if uid not in found.cleared
        ]
        if lost:
            yield wrong(
                about,
                f"{some(lost, _SHOWN)} hold CPUs there and have no running pod on the node",
                "serve releases such claims in seconds: check that it runs, then see "
                '"Cores are not released" in Troubleshooting',
            )


def _contradictions(about: str, node: NodeView) -> Iterator[Finding]:
    ledger, fix = node.ledger, _EDIT.format(node.name)
    held: dict[str, CpuMask] = {}
    for cpu, owner in ledger.owners.items():
        held[owner] = CpuMask(held.get(owner, NO_CPUS) | mask_of([cpu]))
    for uid, cpus in held.items():
        claim = ledger.claims.get(uid)  # type: ignore[call-overload]
        if claim is None:
            yield wrong(about, f"CPUs {format_cpu_list(cpus)} belong to {uid}, which has no claim", fix)
        elif cpus & ~claim.owned:
            over = format_cpu_list(cpus & ~claim.owned)
            yield wrong(about, f"{claim.vm_name} owns CPUs {over}, which its claim does not name", fix)
    for uid, claim in ledger.claims.items():
        if missing := claim.owned & ~held.get(uid, NO_CPUS):
            others = {ledger.owners[cpu] for cpu in cpus_of(CpuMask(missing)) if cpu in ledger.owners}
            holders = f"belong to {some(others)}" if others else "have no owner"
            yield wrong(
                about,
                f"{claim.vm_name} claims CPUs {format_cpu_list(missing)} for itself, which {holders}",
                fix,
            )
        if not isinstance(node.machine, Unusable):
            absent = (claim.cpus | claim.owned) & ~node.machine.topology.cpus
            if absent:
                yield wrong(
                    about,
                    f"{claim.vm_name} claims CPUs {format_cpu_list(absent)}, which the machine does not have",
                    "describe the node again, then restart the VM",
                )


def _without_pods(found: Installation, node: NodeView) -> Mapping[PodUid, Claim]:
    return {
        uid: claim
        for uid, claim in node.ledger.claims.items()
        if (
            _is_old(found.now, claim) and not is_for_migration(claim)
            if (vm := found.view.vms.get(uid)) is None
            else vm.is_over or (vm.node and vm.node != node.name)
        )
    }


def check_vms(found: Installation) -> Iterator[Finding]:
    """Check that every VM that runs has its claim and was measured where it should be."""
    states: dict[VmState, list[str]] = {}
    unclaimed, unmeasured = [], []
    for vm in found.view.vms.values():
        name = f"{vm.namespace}/{vm.name}"
        states.setdefault(vm.state, []).append(name)
        if _lacks_claim(vm) and vm.pod.uid not in found.cleared:
            unclaimed.append(name)
        if _is_held(vm) and vm.pod.uid not in found.cleared:
            yield wrong(
                f"Pod {vm.namespace}/{vm.pod.name}",
                "its QEMU has ended and another container still runs, so KubeVirt starts no "
                f"migration of VM {vm.name}",
                f"`kubectl -n {vm.namespace} delete pod {vm.pod.name}`",
            )
        node = found.view.nodes.get(vm.node)
        agent = node is not None and node.described is not None and node.described.by_agent
        if vm.state is VmState.RUNNING and agent and vm.claim is not None and _is_old(found.now, vm.claim):
            unmeasured.append(name)
    if unclaimed:
        yield wrong(
            counted(len(unclaimed), "VM"),
            f"{some(unclaimed, _SHOWN)}: they run on cores that their node's ledger does not give them",
            "serve restores claims from pods in seconds: check that it runs, or else restart the VMs",
        )
    if drifted := states.get(VmState.NOT_PINNED):
        yield wrong(
            counted(len(drifted), "VM"),
            f"{some(drifted, _SHOWN)}: threads run on other CPUs than placed",
            "read the reason with `kubectl kvplace get vm NAME -n NAMESPACE -o wide`; its action is in "
            '"Reasons of the condition Pinned" in Troubleshooting',
        )
    if unmeasured:
        yield wrong(
            counted(len(unmeasured), "VM"),
            f"{some(unmeasured, _SHOWN)}: the agent has never measured their threads",
            "read the log of the agent on their nodes",
        )
    if floating := states.get(VmState.FLOATING):
        yield warning(
            counted(len(floating), "VM"),
            f"{some(floating, _SHOWN)}: they run without cores of their own, as on-failure: float allows",
            "restart them when cores are free",
        )
    for vmi in found.of(VMIS):
        if unseen := _unseen(found, vmi) - found.cleared:
            yield wrong(
                object_name(vmi, "VirtualMachineInstance"),
                f"it opted in, but its pod (UID {some(unseen)}) did not pass admission",
                "restart the VM once the webhooks answer",
            )


def _unseen(found: Installation, vmi: Document) -> set[str]:
    """Return the UIDs of a VM's pods that were created while the webhooks were down."""
    return set(at(vmi, "status", "activePods") or {}) - {str(uid) for uid in found.view.vms}


def _lacks_claim(vm: VmView) -> bool:
    runs = vm.state in (VmState.RUNNING, VmState.PINNED, VmState.NOT_PINNED)
    return runs and vm.claim is None and _has_cores(vm)


def _is_held(vm: VmView) -> bool:
    return vm.is_held and not vm.pod.deleting


def _has_cores(vm: VmView) -> bool:
    return vm.placement is not None and not vm.placement.placement.floats


def _is_old(now: datetime, claim: Claim) -> bool:
    try:
        return now - datetime.fromisoformat(claim.since) > _SETTLING
    except (ValueError, TypeError):
        return True
