"""A live cluster as the start of a plan: its nodes, the obstacles on them, and VMs that wait already.

The answers of kube-scheduler's own filters count as in `explain`, with the same words. An evacuation is a
plan for the VMs of one node on all other nodes. Nodes are the same values as those of a cluster document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from kvplace.core.cluster.draft import ClosedNodes
from kvplace.core.cluster.planning import PlannedVm, VmRequest, plan
from kvplace.core.errors import Absent
from kvplace.core.ledger import Claim
from kvplace.core.occupant import ClusterNode, Occupant, occupant_of_claim
from kvplace.core.placement import Placement, Reason, Refusal
from kvplace.core.quantity import counted
from kvplace.core.request import PinningOptions, Policy, Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.strict_json import did_you_mean
from kvplace.core.well_known_names import PLACED_LABEL
from kvplace.kube.concurrency import together
from kvplace.kube.node_filters import PodDemands, RunningVmi, SchedulableNode, obstacle
from kvplace.kube.object_client import ObjectClient
from kvplace.kube.object_parts import ApiObject, Metadata
from kvplace.kube.object_records import NO_NODE
from kvplace.kube.watches import NODES, PODS, VMIS, ListClient
from kvplace.nodes.cluster_reading import read_cluster
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmState, VmView
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot, with_claimed_devices

T = TypeVar("T")


class DemandingPod(ApiObject, frozen=True):
    """The demands of a pod on its node."""

    metadata: Metadata
    spec: PodDemands


@dataclass(frozen=True)
class PlanningCluster:
    """The nodes where VMs can go, and the obstacles of the others."""

    nodes: tuple[ClusterNode, ...]
    """The nodes where kvplace can place VMs, with running VMs and the waiting VMs that go there."""
    objects: Mapping[NodeName, SchedulableNode] = field(default_factory=dict)
    """All nodes, as kube-scheduler sees them."""
    unusable: ClosedNodes = field(default_factory=dict)
    """Nodes without a known machine, or without a readable ledger."""
    waiting: int = 0
    """The number of VMs that wait already and were given room here."""
    agreed: frozenset[str] = frozenset()
    """The ids of the VMs that had opted in to moves when their pods were made."""

    def closed_to(self, demands: PodDemands) -> ClosedNodes:
        """Name the nodes that VMs with these demands never go to."""
        return self.closed_where(lambda node: obstacle(node, demands))

    def closed_where(self, obstacle_on: Callable[[SchedulableNode], str]) -> ClosedNodes:
        """Name the nodes that are unusable, or where `obstacle_on` states an obstacle."""
        closed = dict(self.unusable)
        for name, node in self.objects.items():
            sentence = obstacle_on(node)
            if sentence:
                closed[name] = Refusal(Reason.NODE_FILTERED, sentence, {}, never=True)
        return closed

    def counting(self, vms: Iterable[VmRequest]) -> tuple[VmRequest, ...]:
        """Leave out of requests the devices that no agent reports.

        kube-scheduler allocates these (Dynamic Resource Allocation), or no node has them.
        """
        reports = [node.devices for node in self.nodes if node.devices is not None]
        known = {one.resource for devices in reports for one in devices.counts}
        found = []
        for vm in vms:
            devices = {name: count for name, count in vm.request.devices.items() if name in known}
            counted = not reports or len(devices) == len(vm.request.devices)
            found.append(vm if counted else replace(vm, request=replace(vm.request, devices=devices)))
        return tuple(found)

    def need_movable(self, moved: Iterable[str]) -> tuple[str, ...]:
        """Name the VMs that `serve` would not move: their owners have not agreed to it."""
        return tuple(sorted(set(moved) - self.agreed))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for people about the start of a plan."""
        if not self.waiting:
            return ()
        verb = "waits" if self.waiting == 1 else "wait"
        return (f"{counted(self.waiting, 'VM')} that {verb} already came first",)


async def read_planning_cluster(cluster: ListClient, reader: ObjectClient) -> PlanningCluster:
    """Read the start of a plan; needs the rights of a viewer on the whole cluster."""
    view, nodes, pods = await together(
        read_cluster(cluster),
        read_schedulable_nodes(reader),
        read_pods_on(reader, NO_NODE),
    )
    return planning_cluster(view, nodes, pods)


async def read_schedulable_nodes(reader: ObjectClient) -> tuple[SchedulableNode, ...]:
    """Read all nodes as kube-scheduler sees them."""
    return await reader.read_list_as(SchedulableNode, NODES.api)


async def read_pods_on(reader: ObjectClient, node: NodeName) -> tuple[DemandingPod, ...]:
    """Read the pods of a node that opted in; for `NO_NODE` the waiting ones."""
    selected = {"labels": f"{PLACED_LABEL}=true", "fields": f"spec.nodeName={node}"}
    return await reader.read_list_as(DemandingPod, PODS.api, **selected)


def planning_cluster(
    view: ClusterView, nodes: Iterable[SchedulableNode], pods: Iterable[DemandingPod] = ()
) -> PlanningCluster:
    """Combine the nodes of kvplace and kube-scheduler; `pods` has the demands of waiting VMs on a node."""
    objects = {NodeName(node.metadata.name): node for node in nodes}
    unusable = {
        name: Refusal(Reason.NO_TOPOLOGY, node.problem, {}, never=True)
        for name, node in view.nodes.items()
        if node.problem and name in objects
    }
    usable = tuple(node for node in planning_nodes(view) if node.name in objects)
    return _with_waiting(PlanningCluster(usable, objects, unusable, agreed=view.agreed), view, pods)


def _with_waiting(
    cluster: PlanningCluster, view: ClusterView, pods: Iterable[DemandingPod]
) -> PlanningCluster:
    """Give VMs that wait already the room that they will probably take, before any that come later.

    As with kube-scheduler, VMs of higher priority come first.
    """
    claimed = {uid for node in view.nodes.values() for uid in node.ledger.claims}
    closed: dict[bytes, ClosedNodes] = {}
    wanted: dict[int, list[VmRequest]] = {}
    for pod in pods:
        vm = view.vms.get(PodUid(pod.metadata.uid))
        if vm is None or vm.request is None or vm.state is not VmState.WAITING or vm.pod.uid in claimed:
            continue
        key = msgspec.json.encode(pod.spec)
        if key not in closed:
            closed[key] = cluster.closed_to(pod.spec)
        one = VmRequest(f"{vm.namespace}/{vm.pod.name} (waiting)", vm.request.request, closed[key])
        wanted.setdefault(vm.pod.priority, []).append(one)
    waiting = 0
    nodes = cluster.nodes
    for priority in sorted(wanted, reverse=True):
        found = plan(nodes, cluster.counting(wanted[priority]))
        waiting += len(found.planned)
        nodes = _taken(nodes, found.planned)
    return replace(cluster, nodes=nodes, waiting=waiting)


@dataclass(frozen=True)
class Evacuation:
    """The VMs of a node, and the other nodes."""

    elsewhere: PlanningCluster
    vms: tuple[VmRequest, ...]
    restarting: Mapping[str, str]
    """VMs that stop when they leave the node, with the reason."""


async def read_evacuation(cluster: ListClient, reader: ObjectClient, node: NodeName) -> Evacuation:
    """Read the start of an evacuation; raises Absent for a node that the cluster lacks."""
    view, nodes, waiting, leaving, vmis = await together(
        read_cluster(cluster),
        read_schedulable_nodes(reader),
        read_pods_on(reader, NO_NODE),
        read_pods_on(reader, node),
        reader.read_list_as(RunningVmi, VMIS.api, labels=f"kubevirt.io/nodeName={node}"),
    )
    names = [one.metadata.name for one in nodes]
    if node not in names:
        raise Absent(f"the cluster has no node {node!r}{did_you_mean(node, names)}")
    return evacuation(view, node, nodes, waiting, leaving, vmis)


def evacuation(
    view: ClusterView,
    node: NodeName,
    nodes: Iterable[SchedulableNode],
    waiting: Iterable[DemandingPod],
    leaving: Iterable[DemandingPod],
    vmis: Iterable[RunningVmi],
) -> Evacuation:
    """Let every VM of a node make the request that is in effect, on all nodes but this one.

    VMs that wait already come first, as in any plan: kube-scheduler tries them first.
    """
    others = [one for one in nodes if one.metadata.name != node]
    elsewhere = planning_cluster(view, others, waiting)
    obstacles = {f"{vmi.metadata.namespace}/{vmi.metadata.name}": vmi.never_migrates for vmi in vmis}
    vms, restarting = [], {}
    for pod in leaving:
        vm = view.vms.get(PodUid(pod.metadata.uid))
        request = None if vm is None else vm.request_in_effect
        if vm is None or request is None or vm.is_over or vm.state is VmState.ENDING:
            continue
        name = view.names_of_claims.get(vm.pod.uid, f"{vm.namespace}/{vm.name}")
        vms.append(VmRequest(name, request, elsewhere.closed_to(pod.spec)))
        why = obstacles.get(f"{vm.namespace}/{vm.name}", "") if vm.is_vmi else "a pod does not migrate"
        if why:
            restarting[name] = why
    return Evacuation(elsewhere, elsewhere.counting(sorted(vms, key=lambda vm: vm.id)), restarting)


def _taken(nodes: tuple[ClusterNode, ...], planned: Iterable[PlannedVm]) -> tuple[ClusterNode, ...]:
    """Let planned VMs hold their placements."""
    stays = PinningOptions(policy=Policy.IMMOVABLE)
    taken: dict[NodeName, list[Occupant]] = {}
    for one in planned:
        held = Request(max(1, len(one.placement.vcpus)), stays)
        taken.setdefault(one.node, []).append(Occupant(one.id, held, one.placement, devices=one.devices))
    return tuple(replace(node, running=(*node.running, *taken.get(node.name, ()))) for node in nodes)


def planning_nodes(view: ClusterView) -> tuple[ClusterNode, ...]:
    """Return every node where something can be placed, with the VMs that its ledger names."""
    return tuple(
        planning_node(view, node, node.snapshot)
        for node in view.nodes.values()
        if isinstance(node.snapshot, NodeSnapshot)
    )


def planning_node(view: ClusterView, node: NodeView, snapshot: NodeSnapshot) -> ClusterNode:
    """Return a node with the VMs that its ledger names."""
    machine, running = snapshot.machine, _occupants_of(view, node)
    return ClusterNode(node.name, machine.topology, running, machine.pools_shrink, snapshot.free.devices)


def _occupants_of(view: ClusterView, node: NodeView) -> tuple[Occupant, ...]:
    """Return the VMs that the ledger of a node names, `namespace/name`, and the use by others.

    A VM with an unknown placement, or one that is getting other cores, holds the CPUs of its claim and stays
    there.
    """
    topology = node.machine.topology if isinstance(node.machine, NodeMachine) else None
    others = node.machine.others if isinstance(node.machine, NodeMachine) else None
    running = []
    for claim in node.ledger.claims.values():
        name, vm = view.names_of_claims[claim.uid], view.vms.get(claim.uid)
        known = _as_claimed(vm, claim) if vm is not None and claim.relocation is None else None
        running.append(occupant_of_claim(name, claim, topology) if known is None else Occupant(name, *known))
    if others is not None:
        running.append(occupant_of_claim(f"{others.pod} of {node.name}", others, topology))
    return tuple(running)


def _as_claimed(vm: VmView, claim: Claim) -> tuple[Request, Placement] | None:
    """The VM's own request and placement, where they agree with its claim."""
    request = vm.request_in_effect
    if request is None or vm.placement is None:
        return None
    placement = vm.placement.placement
    if (placement.cpus, placement.owned) != (claim.cpus, claim.owned):
        return None
    return (with_claimed_devices(request, placement) if vm.pod.resource_claims else request), placement
