"""The running VMs of a node that may get other cores now, and the resources of the others.

A VM moves only if its owner opted in (`kvplace.io/movable`) and its agent reports every thread in its place.
Meanwhile its owner must not have requested other options, it must not migrate, and its last move must be ten
minutes ago (`nodes/node_cache.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvplace.core.annotations import is_movable, may_migrate, read_options
from kvplace.core.errors import BadAnnotation
from kvplace.core.ledger import Claim
from kvplace.core.occupant import ClusterNode, Occupant, occupant_of_claim
from kvplace.core.placement import PodPlacement
from kvplace.core.request import PinningOptions
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.cluster_view import NodeView, VmView, view_of
from kvplace.nodes.node_cache import PEACE_S, NodeCache
from kvplace.nodes.node_machine import NodeMachine, Unusable, with_claimed_devices

_MOVABLE = '"movable":true'
"""This text is in the request of a movable VM, unless its owner has edited the VM since."""

_MAY_MIGRATE = '"mayMigrate":true'
"""This text is in the request of a VM that may go to another node."""


@dataclass(frozen=True, slots=True)
class MovableVm:
    """A VM that may get other cores, as it is now."""

    pod: PodRecord
    claim: Claim
    placed: PodPlacement
    options: PinningOptions
    """The options of the placement."""
    may_migrate: bool = False
    """Whether its owner lets it go to another node, too."""


class MovableVms:
    """Reads them from the node cache."""

    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache

    def may_be_on(self, node: NodeName) -> bool:
        """Whether a VM may move on a node: an agent sets cpusets there, and an owner may have opted in."""
        if not self._cache.enforcement(node).by_agent:
            return False
        claims = self._cache.ledger(node).claims
        pods = (self._cache.pods.get(uid) for uid in claims)
        return any(pod is not None and self._may_consent(pod) for pod in pods) and not any(
            claim.reserved is not None for claim in claims.values()
        )

    def crowded(self, node: NodeName, taken: Iterable[Claim]) -> ClusterNode | None:
        """Describe a node with the VMs on it; `taken` are holds, which do not move.

        None if no VM can move, or a reservation exists already. A VM that moves now does not move again.
        """
        machine = self._cache.machine(node)
        snapshot = self._cache.snapshot(node)
        if isinstance(machine, Unusable) or isinstance(snapshot, Unusable) or not self.may_be_on(node):
            return None
        claims = self._cache.ledger(node).claims
        occupants = []
        for uid, claim in claims.items():
            stays = self._cache.relocation_times.rest_s(uid, PEACE_S) > 0
            vm = None if stays else self.find(node, uid)
            if vm is None:
                occupants.append(occupant_of_claim(uid, claim, machine.topology))
                continue
            has_devices = self._cache.dra.gives_devices(vm.pod)
            occupants.append(_occupant(vm, has_claimed_devices=has_devices))
        occupants += [
            occupant_of_claim(f"held/{claim.uid}", claim, machine.topology)
            for claim in taken
            if claim.uid not in claims
        ]
        if machine.others is not None:
            occupants.append(occupant_of_claim(machine.others.pod, machine.others, machine.topology))
        if not any(one.movable for one in occupants):
            return None
        return ClusterNode(
            node,
            machine.topology,
            tuple(occupants),
            machine.pools_shrink,
            snapshot.free.devices,
        )

    def find(self, node: NodeName, uid: PodUid) -> MovableVm | None:
        """Return a VM that may get other cores of its node now; None if it may not."""
        pod, claim = self._cache.pods.get(uid), self._cache.ledger(node).claims.get(uid)
        if pod is None or claim is None or pod.node != node or not self._may_consent(pod):
            return None
        if not _runs(pod) or self._cache.migrates(pod):
            return None
        vm, asking = VmView(pod, claim), self._cache.edited_request(pod)
        in_effect = vm.request_in_effect
        if vm.placement is None or vm.request is None or in_effect is None:
            return None
        if obstacle_to_moves(vm, view_of(self._cache, node), asking):
            return None
        migrates = vm.request.may_migrate if asking is None else may_migrate(asking)
        return MovableVm(pod, claim, vm.placement, in_effect.options, migrates)

    def is_starting(self, node: NodeName, uid: PodUid) -> bool:
        """Return whether a VM that agreed at its start to migrate has never been pinned yet."""
        pod, described = self._cache.pods.get(uid), self._cache.topologies.get(node)
        report = described.pods.get(uid) if described is not None else None
        return (
            pod is not None
            and pod.node == node
            and _runs(pod)
            and _MAY_MIGRATE in pod.request
            and (report is None or not report.pinned)
        )

    def _may_consent(self, pod: PodRecord) -> bool:
        edited = bool(pod.asking) if not pod.vmi else pod.vmi_uid in self._cache.edited_vmis.records
        return edited or _MOVABLE in pod.request


def _runs(pod: PodRecord) -> bool:
    return not pod.deleting and not pod.has_ended


def obstacle_to_moves(vm: VmView, node: NodeView, asking: Mapping[str, str] | None) -> str:
    """State why a VM that runs gets no other cores now, as a clause about several VMs; empty if it may.

    `asking` are the annotations with its present request; None if the VM was not edited.
    """
    try:
        wanted = None if asking is None else read_options(asking)
        agrees = has_agreed(vm, asking)
    except BadAnnotation:
        return "their annotations cannot be read"
    if asking is not None and wanted is None:
        return "their annotations were removed"
    if not agrees:
        return "their owners have not agreed (kvplace.io/movable)"
    if not node.enforces:
        return "no agent sets cpusets on their nodes"
    placed, in_effect = vm.placement, vm.request_in_effect
    if placed is None or in_effect is None or not is_settled(vm, placed, node):
        return "they are not pinned"
    if wanted is not None and in_effect.options != (wanted if vm.is_vmi else wanted.of_plain_pod()):
        return "their annotations were edited"
    if not placed.placement.policy.is_movable or placed.placement.guest_cells:
        return "their policy or their guest NUMA cells fix their cores"
    return ""


def has_agreed(vm: VmView, asking: Mapping[str, str] | None) -> bool:
    """Whether the owner of a VM lets it move; raises BadAnnotation."""
    if asking is None:
        return vm.request is not None and vm.request.movable
    return is_movable(asking)


def is_settled(vm: VmView, placed: PodPlacement, node: NodeView) -> bool:
    """Whether pod, ledger and agent state the same placement of a VM, on the machine that is there now."""
    claim, report, machine = vm.claim, node.reports.get(vm.pod.uid), node.machine
    return (
        isinstance(machine, NodeMachine)
        and (placed.node, placed.topology) == (vm.node, machine.topology.fingerprint)
        and claim is not None
        and claim.relocation is None
        and (claim.cpus, claim.owned, claim.revision)
        == (placed.placement.cpus, placed.placement.owned, placed.revision)
        and report is not None
        and report.pinned
        and report.running
        and report.revision == placed.revision
        and report.failed_revision < placed.revision
    )


def _occupant(vm: MovableVm, *, has_claimed_devices: bool) -> Occupant:
    request = replace(read_pod_request(vm.pod.request).request, options=vm.options)
    if has_claimed_devices:
        request = with_claimed_devices(request, vm.placed.placement)
    return Occupant(vm.pod.uid, request, vm.placed.placement)
