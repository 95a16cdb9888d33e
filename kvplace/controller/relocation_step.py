"""The next step towards other cores for a running pod, as a pure decision about the stored state.

    Begin ──▶ ledger: the claim holds the next placement, too
    Write ──▶ pod: kvplace.io/placement and cpu-map state the next revision
    Wait  ──▶ the node's agent carries it out and reports the revision
    Finish ─▶ ledger: the claim holds the new placement alone
    GoBack ─▶ the agent reports that it failed: the old placement becomes one more revision
    Resume ─▶ another client has taken the relocation out of the ledger: it is put back there

Each step follows from the ledger, the pod and the agent's report alone, so it does not matter which replica
made the last one, or whether its answer arrived.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvplace.core.allocator.allocate import place, try_place
from kvplace.core.annotations import contradiction_in, place_again_of
from kvplace.core.claim_changes import held_by_others
from kvplace.core.cluster.defragmentation import is_better
from kvplace.core.cpuset import union
from kvplace.core.device_locality import local_nodes
from kvplace.core.errors import BadAnnotation
from kvplace.core.ledger import Claim, Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.node_devices import NO_NUMA
from kvplace.core.occupant import keeps_memory
from kvplace.core.placement import Placement, PodPlacement, Refusal
from kvplace.core.request import DeviceNuma, GuestNuma, OnFailure, PinningOptions, Policy, Request
from kvplace.core.request_json import PodRequest, read_pod_request
from kvplace.core.scalars import NO_CPUS, NumaId
from kvplace.core.well_known_names import MOVABLE
from kvplace.kube.object_records import PodRecord, PodReport, TopologyRecord
from kvplace.nodes.node_machine import NodeMachine


@dataclass(frozen=True, slots=True)
class Nothing:
    """The pod has the cores of its request, or no known request."""


@dataclass(frozen=True, slots=True)
class Cannot:
    """Its owner requests a change that a running pod cannot get."""

    why: str
    """One sentence with the action to take instead."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Choose other cores and claim them beside the present ones."""

    pod_request: PodRequest
    """The present request."""
    previous: PodPlacement | None
    """The placement in effect; None for a pod that was never placed."""
    claim: Claim | None = None
    """The claim that the step was decided on."""
    device_nodes: frozenset[NumaId] = frozenset()
    """NUMA nodes of its devices: the cores of a pod without a QEMU yet follow them."""
    only_better: bool = False
    """Whether it gets only cores that are better than the present ones, and else none."""

    @property
    def revision(self) -> int:
        """The revision that the new placement gets."""
        return 1 + (self.previous.revision if self.previous is not None else 0)


@dataclass(frozen=True, slots=True)
class Write:
    """Write the claimed placement on the pod."""

    next: PodPlacement


@dataclass(frozen=True, slots=True)
class Wait:
    """The next step is another component's: the agent, a watch, or the reconciler."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Give up the resources that the placement in effect does not need."""

    in_effect: PodPlacement
    is_way_back: bool = False
    """Whether it ends the return to a placement after a failed revision."""


@dataclass(frozen=True, slots=True)
class GoBack:
    """The agent could not carry the revision out and has undone it."""

    failed: PodPlacement
    why: str


@dataclass(frozen=True, slots=True)
class Resume:
    """The pod's placement, or the one that its agent restored, is no longer in the ledger."""

    relocation: Relocation
    claim: Claim | None
    """The claim that the step was decided on."""


Step: TypeAlias = Nothing | Cannot | Begin | Write | Wait | Finish | GoBack | Resume


@dataclass(frozen=True, slots=True)
class Asked:
    """The present request in the annotations of a running VM."""

    options: PinningOptions
    place_again: str
    """The value of `kvplace.io/place-again`; empty without it."""
    agrees: bool
    """Whether the owner agrees that the VM gets other cores."""


_HOOK_WAITS = (DeviceNuma.REQUIRED, DeviceNuma.SOCKET)


def next_step(
    pod: PodRecord,
    ledger: Ledger,
    asked: Asked | None,
    described: TopologyRecord | None,
    *,
    enforces: bool,
    migrates: bool,
) -> Step:
    """Return the next step for a pod that is bound to the node with this ledger and description.

    `asked`: the present request of its owner, None where that was not edited. `enforces`: whether the node
    has an agent that sets cpusets. `migrates`: whether the VM has another pod.
    """
    if pod.has_ended or not pod.node:
        return Nothing()
    try:
        placed = PodPlacement.from_json(pod.placement) if pod.placement else None
    except BadAnnotation:
        return Nothing()  # the reconciler and the agent report it
    claim = ledger.claims.get(pod.uid)
    report = described.pods.get(pod.uid) if described is not None else None
    if claim is not None and placed is not None and claim.revision > placed.revision:
        return Wait()  # the cache has the pod as it was before the relocation that has just ended
    if claim is not None and claim.relocation is not None:
        return _go_on(claim, placed, report)
    restored_placement = _restored_placement(placed, report)
    if placed is not None and restored_placement is not None:
        is_settled = _holds(claim, placed) or _is_taken(ledger, placed)
        return Resume(Relocation(placed, restored_placement), claim) if is_settled else Wait()
    may_follow_devices = placed is not None and enforces and not migrates and _holds(claim, placed)
    if may_follow_devices and (device_nodes := nodes_to_follow(pod, described)):
        return Begin(read_pod_request(pod.request), placed, claim, device_nodes)
    return Nothing() if asked is None else _answer_edit(pod, claim, placed, report, asked, enforces, migrates)


def _answer_edit(
    pod: PodRecord,
    claim: Claim | None,
    placed: PodPlacement | None,
    report: PodReport | None,
    asked: Asked,
    enforces: bool,
    migrates: bool,
) -> Step:
    try:
        pod_request = read_pod_request(pod.request) if pod.request else None
    except BadAnnotation as error:
        return Cannot(str(error))
    if pod_request is None:
        return Cannot("the VM was started without options, so its size is not known; restart it")
    options = asked.options if pod.vmi else asked.options.of_plain_pod()
    answered = pod_request.request.options if placed is None or placed.options is None else placed.options
    only_better = options == answered
    if only_better and (placed is None or asked.place_again != place_again_of(pod.uid, placed.revision)):
        return Nothing()
    if only_better and not asked.agrees:
        return Cannot(f"its owner has not agreed to other cores; set {MOVABLE}")
    obstacle = _obstacle(pod, placed, options, enforces=enforces, migrates=migrates)
    if obstacle:
        return Cannot(obstacle)
    if placed is not None and not (_holds(claim, placed) and _is_in_effect(placed, report)):
        return Wait()
    has_qemu = report is not None and report.pinned
    follows_devices_first = bool(pod.vmi and pod_request.request.devices)  # and no other revision, until then
    if (only_better or follows_devices_first) and not has_qemu:
        return Wait()
    asking = replace(pod_request, request=replace(pod_request.request, options=options))
    return Begin(asking, placed, claim, only_better=only_better)


def place_again(
    machine: NodeMachine, ledger: Ledger, pod: PodRecord, step: Begin, *, pins_memory: bool
) -> Placement | str:
    """Choose cores for a running pod as if it had none: its present cores if they serve, else the best.

    A pod that gets only better cores never keeps its present ones. Where devices of the host pin its memory,
    it gets cores of its NUMA nodes only. Returns the reason where it gets none.
    """
    request = _with_chosen_devices(step)
    if request.options.policy is Policy.NONE:
        return Placement(Policy.NONE, (), NO_CPUS)
    present = ledger.claims.get(pod.uid)
    others = ledger.after(LedgerChange(releases=(pod.uid,)))
    before = step.previous.placement if step.previous is not None and pins_memory else None
    nodes = () if before is None else before.numa_nodes
    if nodes:
        cpus = union(node.cpus for node in machine.topology.numa_nodes if node.id in nodes)
        machine = replace(machine, allocatable=machine.allocatable & cpus)
    if present is not None and request.options.policy is not Policy.NUMA and not step.only_better:
        present_cpus = replace(machine, allocatable=machine.allocatable & present.cpus)
        staying = try_place(machine.topology, present_cpus.free(others), request)
        if staying is not None and (before is None or keeps_memory(request, before, staying)):
            return staying
    found = place(machine.topology, machine.free(others), request)
    named = f"NUMA node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
    stays = f"devices of the host access its memory, which stays on {named} while it runs" if nodes else ""
    if isinstance(found, Refusal):
        return f"{found.message}; {stays}" if stays else found.message
    if step.only_better and step.previous is not None:
        free, present_placement = machine.free(others), step.previous.placement
        if not is_better(machine.topology, free, present_placement, found):
            return "there are no better cores for it"
    return found if before is None or keeps_memory(request, before, found) else stays


def _with_chosen_devices(step: Begin) -> Request:
    """Return the request after the kubelet has chosen the devices: free ones do not matter any more."""
    request = replace(step.pod_request.request, devices={}, device_nodes=step.device_nodes)
    if not step.device_nodes or request.options.device_numa is not DeviceNuma.PREFERRED:
        return request
    return replace(request, options=replace(request.options, device_numa=DeviceNuma.REQUIRED))


def nodes_to_follow(pod: PodRecord, described: TopologyRecord | None) -> frozenset[NumaId]:
    """Return the NUMA nodes of a pod's devices if these are not local and its cores can still follow them.

    They can while no QEMU has memory and no domain has guest cells: until its compute container exists, and
    longer where the hook does not let QEMU start. All of its devices must have been reported.
    """
    report = described.devices.pods.get(pod.uid) if described is not None and described.devices else None
    if not report or described is None or described.topology is None or pod.has_ended or not pod.vmi:
        return frozenset()
    seen = described.pods.get(pod.uid)
    try:
        placed, request = PodPlacement.from_json(pod.placement), read_pod_request(pod.request).request
    except BadAnnotation:
        return frozenset()
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


def _go_on(claim: Claim, placed: PodPlacement | None, report: PodReport | None) -> Step:
    """Return the step after Begin."""
    relocation = claim.relocation
    assert relocation is not None
    if placed is None or placed.revision < relocation.next.revision:
        return Write(relocation.next)
    if not _holds(claim, placed):
        return Resume(Relocation(placed, relocation.previous), claim)  # it was written late, for a lost claim
    if report is None:
        return Wait()
    if report.pinned and report.revision >= placed.revision:
        return Finish(placed, relocation.is_way_back)
    if relocation.is_way_back:
        # It cannot fail. Threads that are set anew again and again must not keep CPUs that they have left.
        left = claim.cpus & ~placed.placement.cpus
        is_measured = report.revision >= placed.revision and bool(report.cpus)
        return Finish(placed, is_way_back=True) if is_measured and not report.cpus & left else Wait()
    if report.failed_revision >= placed.revision:
        return GoBack(placed, report.drift)
    return Wait()


def _obstacle(
    pod: PodRecord, placed: PodPlacement | None, asked: PinningOptions, *, enforces: bool, migrates: bool
) -> str:
    """State why a running pod cannot get the requested change; empty if it can be tried."""
    if found := contradiction_in(asked):
        return f"{found.word.value} contradicts {found.other.value}: {found.reason}"
    if not enforces:
        return f"no kvplace agent sets cpusets on node {pod.node}; the change takes effect at the next start"
    if migrates:
        return "the VM is being live-migrated; the change is tried again when that has ended"
    if placed is not None and placed.placement.policy is Policy.IMMOVABLE:
        return "its policy is immovable, so its CPUs never change while it runs; restart it"
    if asked.guest_numa is GuestNuma.MIRROR or (placed is not None and placed.placement.guest_cells):
        return "the guest's NUMA cells cannot change while it runs; restart it"
    return ""
