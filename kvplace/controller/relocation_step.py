"""The next step towards other cores for a running pod, as a pure decision about the stored state.

    Begin ──▶ ledger: the claim holds the next placement, too
    Write ──▶ pod: kvplace.io/placement and cpu-map state the next revision
              the node's agent carries it out and reports the revision
    Finish ─▶ ledger: the claim holds the new placement alone
    GoBack ─▶ the agent reports that it failed: the old placement becomes one more revision
    Resume ─▶ another client has taken the relocation out of the ledger: it is put back there

Each step follows from the ledger, the pod and the agent's report alone, so it does not matter which replica
made the last one, or whether its answer arrived. Edits, defragmentation and devices that are not local differ
in their reason for Begin only. A VM that makes room for another one enters at Write: the scheduler begins.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvplace.controller.cluster import CheckedNode
from kvplace.core.annotations import contradiction_in, is_movable, place_again_of, read_options
from kvplace.core.claim_changes import held_by_others
from kvplace.core.device_locality import local_nodes
from kvplace.core.errors import BadAnnotation
from kvplace.core.ledger import Claim, Ledger, Relocation, claim_of
from kvplace.core.node_devices import NO_NUMA
from kvplace.core.placement import PodPlacement
from kvplace.core.request import DeviceNuma, GuestNuma, OnFailure, PinningOptions, Policy
from kvplace.core.request_json import PodRequest, read_pod_request
from kvplace.core.scalars import NumaId
from kvplace.core.well_known_names import MOVABLE, PLACE_AGAIN, RELOCATED
from kvplace.kube.events import EventReason, EventRecord, owner_reference, relocated
from kvplace.kube.object_records import PodRecord, PodReport, TopologyRecord


@dataclass(frozen=True, slots=True)
class Cannot:
    """Its owner requests a change that a running pod cannot get."""

    why: str
    """One sentence with the action to take instead."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Choose other cores and claim them beside the present ones."""

    claim: Claim | None
    """The claim that this step, like each of the others, was decided on."""
    pod_request: PodRequest
    """The present request."""
    previous: PodPlacement | None
    """The placement in effect; None for a pod that was never placed."""
    device_nodes: frozenset[NumaId] = frozenset()
    """NUMA nodes of its devices: the cores of a pod without a QEMU yet follow them."""
    only_better: bool = False
    """Whether it gets only cores that are better than the present ones, and else none."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write the claimed placement on the pod."""

    next: PodPlacement


@dataclass(frozen=True, slots=True)
class Finish:
    """Give up the resources that the placement in effect does not need."""

    claim: Claim
    in_effect: PodPlacement

    @property
    def is_way_back(self) -> bool:
        """Whether it ends the return to a placement after a failed revision."""
        return self.claim.relocation is not None and self.claim.relocation.is_way_back


@dataclass(frozen=True, slots=True)
class GoBack:
    """The agent could not carry the revision out and has undone it."""

    claim: Claim
    failed: PodPlacement
    why: str


@dataclass(frozen=True, slots=True)
class Resume:
    """The pod's placement, or the one that its agent restored, is no longer in the ledger."""

    claim: Claim | None
    relocation: Relocation


ClaimStep: TypeAlias = Begin | Finish | GoBack | Resume
"""The steps that change the ledger: `relocation_claims` has the change of each."""
RelocationStep: TypeAlias = Cannot | Write | ClaimStep

_HOOK_WAITS = (DeviceNuma.REQUIRED, DeviceNuma.SOCKET)


def next_step(pod: PodRecord, node: CheckedNode) -> RelocationStep | None:
    """Return the next step for a pod that is bound to a node.

    None where the pod has the cores of its request, and where the next step is another component's: the
    agent, a watch, or the reconciler.
    """
    if pod.has_ended or not pod.node:
        return None
    try:
        placed = PodPlacement.from_json(pod.placement) if pod.placement else None
    except BadAnnotation:
        return None  # the reconciler and the agent report it
    claim, report = node.ledger.claims.get(pod.uid), node.reports.get(pod.uid)
    if claim is not None and placed is not None and claim.revision > placed.revision:
        return None  # the cache has the pod as it was before the relocation that has just ended
    if claim is not None and claim.relocation is not None:
        return _go_on(claim, claim.relocation, placed, report)
    restored_placement = _restored_placement(placed, report)
    if placed is not None and restored_placement is not None:
        is_settled = _holds(claim, placed) or _is_taken(node.ledger, placed)
        return Resume(claim, Relocation(placed, restored_placement)) if is_settled else None
    may_follow = node.enforces and pod.uid not in node.migrating
    if placed is not None and may_follow and _holds(claim, placed):
        device_nodes = _nodes_to_follow(pod, placed, node.described)
        if device_nodes:
            return Begin(claim, read_pod_request(pod.request), placed, device_nodes)
    try:
        return _answer_edit(pod, node, claim, placed, report)
    except BadAnnotation as error:
        return Cannot(str(error))


def end_event(step: ClaimStep, pod: PodRecord) -> EventRecord | None:
    """Return the event that states to the owner of a pod how a relocation ends; None before its end.

    The pod's condition states the same.
    """
    owner = owner_reference(pod)
    match step:
        case GoBack(_, failed, why):
            return EventRecord(
                owner,
                EventReason.NOT_RELOCATED,
                f"revision {failed.revision} failed on {pod.node} and was undone: {why}",
            )
        case Finish(_, in_effect) if not step.is_way_back:
            return relocated(owner, pod.node, in_effect)
        case Finish(_, in_effect) if (known := pod.condition(RELOCATED)) is None or known.status:
            return EventRecord(
                owner,
                EventReason.NOT_RELOCATED,
                f"revision {in_effect.revision - 1} failed on {pod.node} and was undone",
            )
    return None


def _answer_edit(
    pod: PodRecord,
    node: CheckedNode,
    claim: Claim | None,
    placed: PodPlacement | None,
    report: PodReport | None,
) -> RelocationStep | None:
    """Return the first step after an edit; raises BadAnnotation if it, or the request, cannot be read."""
    asking = node.edits.get(pod.uid, {})
    asked = read_options(asking)
    if asked is None:
        return None
    if not pod.request:
        return Cannot("the VM was started without options, so its size is not known; restart it")
    pod_request = read_pod_request(pod.request)
    options = asked if pod.vmi else asked.of_plain_pod()
    answered = pod_request.request.options if placed is None or placed.options is None else placed.options
    only_better = options == answered
    if only_better:
        place_again = asking.get(PLACE_AGAIN, "")
        if placed is None or place_again != place_again_of(pod.uid, placed.revision):
            return None
        if not is_movable(asking):
            return Cannot(f"its owner has not agreed to other cores; set {MOVABLE}")
    if obstacle := _obstacle(pod, node, placed, options):
        return Cannot(obstacle)
    if placed is not None and not (_holds(claim, placed) and _is_in_effect(placed, report)):
        return None
    has_qemu = report is not None and report.pinned
    follows_devices_first = bool(pod.vmi and pod_request.request.devices)  # and no other revision, until then
    if (only_better or follows_devices_first) and not has_qemu:
        return None
    asking_request = replace(pod_request, request=replace(pod_request.request, options=options))
    return Begin(claim, asking_request, placed, only_better=only_better)


def _nodes_to_follow(
    pod: PodRecord, placed: PodPlacement, described: TopologyRecord | None
) -> frozenset[NumaId]:
    """Return the NUMA nodes of a pod's devices if these are not local and its cores can still follow them.

    They can while no QEMU has memory and no domain has guest cells: until its compute container exists, and
    longer where the hook does not let QEMU start. All of its devices must have been reported.
    """
    report = described.devices.pods.get(pod.uid) if described is not None and described.devices else None
    if not report or described is None or described.topology is None or not pod.vmi:
        return frozenset()
    try:
        request = read_pod_request(pod.request).request
    except BadAnnotation:
        return frozenset()
    seen = described.pods.get(pod.uid)
    hook_waits = request.options.device_numa in _HOOK_WAITS and placed.on_failure is OnFailure.WAIT
    has_compute = bool(pod.compute_container) or (seen is not None and seen.running)
    has_qemu = seen is not None and (seen.pinned or bool(seen.cpus))
    if has_qemu or (has_compute and not hook_waits):
        return frozenset()
    nodes = frozenset(device.node for device in report if device.node != NO_NUMA)
    is_whole = Counter(device.resource for device in report) == Counter(request.devices)
    if not is_whole or placed.revision != 1 or placed.placement.floats:
        return frozenset()
    mode, placement = request.options.device_numa, placed.placement
    near = local_nodes(described.topology, mode, placement.numa_nodes, placement.cpus)
    return frozenset() if mode is DeviceNuma.OFF or nodes <= near else nodes


def _restored_placement(placed: PodPlacement | None, report: PodReport | None) -> PodPlacement | None:
    """Return the placement in effect after the agent has undone the newest revision; None if it has not."""
    if placed is None or report is None or report.failed_revision != placed.revision:
        return None
    try:
        found = PodPlacement.from_json(report.restored_placement)
    except BadAnnotation:
        return None
    is_before = (found.pod_uid, found.node) == (placed.pod_uid, placed.node)
    return found if is_before and found.revision < placed.revision else None


def _is_in_effect(placed: PodPlacement, report: PodReport | None) -> bool:
    """Whether a placement is in effect; the placement of the bind is so from the beginning."""
    if placed.revision == 1:
        return True
    return report is not None and report.pinned and report.revision >= placed.revision


def _holds(claim: Claim | None, placed: PodPlacement) -> bool:
    """Whether a claim holds all CPUs that a pod uses: a relocation keeps only CPUs of the claim."""
    cpus, owned = placed.placement.cpus, placed.placement.owned
    if claim is None:
        return placed.placement.floats
    is_pool = placed.placement.policy is Policy.NUMA  # others may take CPUs out of it
    return not (owned & ~claim.owned or (cpus & ~claim.cpus and not is_pool))


def _is_taken(ledger: Ledger, placed: PodPlacement) -> bool:
    """Whether others have CPUs that a pod was to use, so that its claim cannot be restored."""
    return bool(held_by_others(ledger, claim_of(placed.pod_uid, placed.placement)))


def _go_on(
    claim: Claim, relocation: Relocation, placed: PodPlacement | None, report: PodReport | None
) -> RelocationStep | None:
    """Return the step after Begin."""
    if placed is None or placed.revision < relocation.next.revision:
        return Write(relocation.next)
    if not _holds(claim, placed):
        return Resume(claim, Relocation(placed, relocation.previous))  # it was written late, for a lost claim
    if report is None:
        return None
    if report.pinned and report.revision >= placed.revision:
        return Finish(claim, placed)
    if relocation.is_way_back:
        # It cannot fail. Threads that are set anew again and again must not keep CPUs that they have left.
        left = claim.cpus & ~placed.placement.cpus
        is_measured = report.revision >= placed.revision and bool(report.cpus)
        return Finish(claim, placed) if is_measured and not report.cpus & left else None
    if report.failed_revision >= placed.revision:
        return GoBack(claim, placed, report.drift)
    return None


def _obstacle(pod: PodRecord, node: CheckedNode, placed: PodPlacement | None, asked: PinningOptions) -> str:
    """State why a running pod cannot get the requested change; empty if it can be tried."""
    if found := contradiction_in(asked):
        return f"{found.word.value} contradicts {found.other.value}: {found.reason}"
    if not node.enforces:
        return f"no kvplace agent sets cpusets on node {pod.node}; the change takes effect at the next start"
    if pod.uid in node.migrating:
        return "the VM is being live-migrated; the change is tried again when that has ended"
    if placed is not None and placed.placement.policy is Policy.IMMOVABLE:
        return "its policy is immovable, so its CPUs never change while it runs; restart it"
    if asked.guest_numa is GuestNuma.MIRROR or (placed is not None and placed.placement.guest_cells):
        return "the guest's NUMA cells cannot change while it runs; restart it"
    return ""
