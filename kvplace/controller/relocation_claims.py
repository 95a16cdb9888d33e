"""The change of the ledger that makes a step of a relocation, as a pure decision.

A pod's claim holds all that the pod may use until the agent has confirmed that it no longer does.
"""

from __future__ import annotations

from dataclasses import replace

from kvplace.controller.relocation_step import Begin, ClaimStep, Finish, GoBack, Resume
from kvplace.core.allocator.allocate import place, try_place
from kvplace.core.claim_changes import (
    claim_after_relocation,
    claim_while_relocating,
    claim_with_lost_relocation,
    claim_without_lost_relocation,
    held_by_others,
    way_back,
)
from kvplace.core.cluster.defragmentation import is_better
from kvplace.core.cpuset import format_cpu_list, union
from kvplace.core.ledger import Claim, Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.occupant import keeps_memory
from kvplace.core.placement import Placement, PodPlacement, Refusal
from kvplace.core.request import DeviceNuma, Policy, Request
from kvplace.core.scalars import NO_CPUS
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_machine import NodeMachine, Unusable


def claim_change(
    step: ClaimStep,
    pod: PodRecord,
    ledger: Ledger,
    machine: NodeMachine | Unusable,
    *,
    dra_devices: bool,
) -> tuple[LedgerChange, str]:
    """Return the change that makes a step, and the answer for the pod's owner; empty where there is none.

    The change is empty where the step cannot be made, and where the ledger has another claim than the one
    that the step was decided on. `dra_devices`: whether the pod has devices of resource claims.
    """
    if ledger.claims.get(pod.uid) != step.claim:
        return LedgerChange(), ""  # conflict with another writer, or an earlier write without an answer
    match step:
        case Begin():
            has_devices = step.pod_request.request.pins_memory or dra_devices
            return _begin(step, pod, ledger, machine, pins_memory=has_devices and not step.device_nodes)
        case Finish(claim, in_effect):
            after = claim_after_relocation(claim, in_effect)
            return LedgerChange(claims=(after,)) if after else LedgerChange(releases=(pod.uid,)), ""
        case GoBack(claim, failed):
            return LedgerChange(claims=(way_back(claim, failed),)), ""
        case Resume():
            return _resume(step, pod, ledger)


def _begin(
    step: Begin, pod: PodRecord, ledger: Ledger, machine: NodeMachine | Unusable, *, pins_memory: bool
) -> tuple[LedgerChange, str]:
    """Claim a new placement beside the present one.

    `pins_memory`: whether devices access its memory; before its QEMU starts none does.
    """
    if isinstance(machine, Unusable):
        answer: Placement | str = machine.problem
    else:
        answer = _place_again(machine, ledger, pod, step, pins_memory=pins_memory)
    if isinstance(answer, str) or isinstance(machine, Unusable):
        nodes = ", ".join(map(str, sorted(step.device_nodes)))
        why = f"node {pod.node}: {answer}"
        return LedgerChange(), f"its devices are on NUMA node {nodes}; {why}" if nodes else why
    options = step.pod_request.request.options
    following = PodPlacement(
        pod.uid,
        pod.node,
        machine.topology.fingerprint,
        options.on_failure,
        answer,
        enforced=step.previous is not None and step.previous.enforced,
        revision=1 + (0 if step.previous is None else step.previous.revision),
        options=options,
        device_numa=options.device_numa,
    )
    moving = claim_while_relocating(step.claim or _empty_claim(pod), Relocation(following, step.previous))
    return LedgerChange(claims=(moving,)), ""


def _resume(step: Resume, pod: PodRecord, ledger: Ledger) -> tuple[LedgerChange, str]:
    """Claim again the placement in effect, beside the newest one.

    Where others have CPUs of the newest placement by now, the pod goes back to the placement in effect.
    """
    lost, present = step.relocation, step.claim or _empty_claim(pod)
    claim = claim_with_lost_relocation(ledger, present, lost)
    taken = held_by_others(ledger, claim)
    if not taken:
        return LedgerChange(claims=(claim,)), ""
    why = (
        f"revision {lost.next.revision} cannot be in effect on {pod.node}: "
        f"CPUs {format_cpu_list(taken)} belong to others by now"
    )
    claim = claim_without_lost_relocation(ledger, present, lost)
    if held_by_others(ledger, claim) & ~present.cpus:
        return LedgerChange(), f"{why}, and so do the CPUs that it runs on; restart it"
    return LedgerChange(claims=(claim,)), why


def _empty_claim(pod: PodRecord) -> Claim:
    nothing = Placement(Policy.NONE, (), NO_CPUS)
    return claim_of(pod.uid, nothing, namespace=pod.namespace, pod=pod.name, vmi=pod.vmi)


def _place_again(
    machine: NodeMachine, ledger: Ledger, pod: PodRecord, step: Begin, *, pins_memory: bool
) -> Placement | str:
    """Choose cores for a running pod as if it had none: its present cores if they serve, else the best.

    A pod that gets only better cores never keeps its present ones. Where devices of the host pin its memory,
    it gets cores of its NUMA nodes only. Returns the reason where it gets none.
    """
    request = _with_chosen_devices(step)
    if request.options.policy is Policy.NONE:
        return Placement(Policy.NONE, (), NO_CPUS)
    others = ledger.after(LedgerChange(releases=(pod.uid,)))
    before = step.previous.placement if step.previous is not None and pins_memory else None
    nodes = () if before is None else before.numa_nodes
    free = machine.free(others)
    if nodes:
        free = free.within(union(node.cpus for node in machine.topology.numa_nodes if node.id in nodes))
    if step.claim is not None and request.options.policy is not Policy.NUMA and not step.only_better:
        staying = try_place(machine.topology, free.within(step.claim.cpus), request)
        if staying is not None and (before is None or keeps_memory(request, before, staying)):
            return staying
    found = place(machine.topology, free, request)
    named = f"NUMA node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
    stays = f"devices of the host access its memory, which stays on {named} while it runs" if nodes else ""
    if isinstance(found, Refusal):
        return f"{found.message}; {stays}" if stays else found.message
    present = step.previous.placement if step.previous is not None and step.only_better else None
    if present is not None and not is_better(machine.topology, free, present, found):
        return "there are no better cores for it"
    return found if before is None or keeps_memory(request, before, found) else stays


def _with_chosen_devices(step: Begin) -> Request:
    """Return the request after the kubelet has chosen the devices: free ones do not matter any more."""
    request = replace(step.pod_request.request, devices={}, device_nodes=step.device_nodes)
    if not step.device_nodes or request.options.device_numa is not DeviceNuma.PREFERRED:
        return request
    return replace(request, options=replace(request.options, device_numa=DeviceNuma.REQUIRED))
