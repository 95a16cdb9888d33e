"""A live cluster as the start of defragmentation: its nodes, and the VMs that may move now.

A VM moves by the rules of `movable_vms`, and not if it has devices of the host. Between nodes KubeVirt must
be able to migrate it, too. `serve` checks a VM again before it moves inside its node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec

from kvplace.core.annotations import may_migrate
from kvplace.core.cluster.draft import ClosedNodes
from kvplace.core.label_terms import LabelTerms
from kvplace.core.occupant import ClusterNode
from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import RELOCATED
from kvplace.kube.api_errors import NotFound
from kvplace.kube.concurrency import together
from kvplace.kube.migrations import MIGRATIONS, PEACE_AFTER_MIGRATION_S, MigrationRecord
from kvplace.kube.node_filters import RunningVmi, SchedulableNode
from kvplace.kube.object_client import ObjectClient
from kvplace.kube.object_records import NO_NODE
from kvplace.kube.watches import VMIS, ListClient, Selector
from kvplace.nodes.cluster_reading import read_cluster
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmState, VmView
from kvplace.nodes.movable_vms import obstacle_to_moves
from kvplace.nodes.node_cache import PEACE_S
from kvplace.nodes.planning_cluster import (
    PlanningCluster,
    planning_cluster,
    read_pods_on,
    read_schedulable_nodes,
)


@dataclass(frozen=True)
class MovableCluster:
    """The nodes with their running VMs, and the VMs that may move."""

    nodes: tuple[ClusterNode, ...]
    vms: Mapping[str, VmView]
    """The VMs that may move inside their nodes, between them, or both, by their ids on the nodes."""
    inside: frozenset[str]
    between: Mapping[str, ClosedNodes]
    """The VMs that may migrate, each with the nodes that are closed to it."""
    stay: Mapping[str, int]
    """The number of VMs that do not move at all, by reason."""


async def read_movable_cluster(
    cluster: ListClient, reader: ObjectClient, nodes: LabelTerms, now: datetime
) -> MovableCluster:
    """Read the nodes with these labels, and their VMs; needs the rights of a viewer on the whole cluster."""
    view, objects, waiting, vmis, migrations = await together(
        read_cluster(cluster, nodes=Selector(label_terms=nodes)),
        read_schedulable_nodes(reader),
        read_pods_on(reader, NO_NODE),
        reader.read_list_as(RunningVmi, VMIS.api),
        _migrations(cluster),
    )
    chosen = tuple(one for one in objects if one.metadata.name in view.nodes)
    return movable_cluster(view, planning_cluster(view, chosen, waiting), vmis, migrations, now)


async def _migrations(cluster: ListClient) -> tuple[MigrationRecord, ...]:
    """Read the live migrations; none where KubeVirt is not installed."""
    try:
        return await cluster.read_all(MIGRATIONS)
    except NotFound:
        return ()


def movable_cluster(
    view: ClusterView,
    planning: PlanningCluster,
    vmis: Iterable[RunningVmi],
    migrations: Iterable[MigrationRecord],
    now: datetime,
) -> MovableCluster:
    """Find the VMs that may move; VMs that wait have got the room that they will probably take."""
    known_vmis = {(vmi.metadata.namespace, vmi.uid): vmi for vmi in vmis}
    under_way = {(one.namespace, one.vmi) for one in migrations if not one.has_ended}
    names = view.names_of_claims
    times = Counter((vm.namespace, vm.pod.vmi_uid) for vm in view.vms.values() if not vm.is_over)
    movable, inside, between = {}, set(), {}
    stay: Counter[str] = Counter()
    closed: dict[tuple[bytes, NodeName], ClosedNodes] = {}
    """The nodes closed to VMs with equal specs on one node."""
    for uid, vm in view.vms.items():
        node = view.nodes.get(vm.node)
        if node is None or vm.is_over or vm.state is VmState.ENDING or uid not in names:
            continue
        key = (vm.namespace, vm.pod.vmi_uid)
        vmi = known_vmis.get(key) if vm.is_vmi else None
        migrates = times[key] > 1 or (vm.namespace, vm.name) in under_way
        why = "they migrate" if vm.is_vmi and migrates else _obstacle(vm, vmi, node)
        if why:
            stay[why] += 1
            continue
        relocated = vm.pod.condition(RELOCATED)
        rests = relocated is not None and now - _moment(relocated.changed) < timedelta(seconds=PEACE_S)
        started = _moment(vm.pod.created) if vm.pod.created else now
        has_settled = now - started >= timedelta(seconds=PEACE_AFTER_MIGRATION_S)
        if not rests:
            inside.add(names[uid])
        if vmi is not None and not rests and has_settled and may_migrate(vmi.asking) and not vmi.obstacle:
            spec = (msgspec.json.encode(vmi.spec), vm.node)
            if spec not in closed:
                closed[spec] = _closed_to(vmi, vm.node, view, planning)
            between[names[uid]] = closed[spec]
        if rests:
            stay["they got other cores lately"] += 1
        else:
            movable[names[uid]] = vm
    return MovableCluster(planning.nodes, movable, frozenset(inside), between, stay)


def _closed_to(
    vmi: RunningVmi, source: NodeName, view: ClusterView, planning: PlanningCluster
) -> ClosedNodes:
    """Name the nodes that a VM never migrates to from its node."""
    here = planning.objects.get(source)

    def obstacle_on(node: SchedulableNode) -> str:
        if here is None:
            return "its node is unknown"
        known = view.nodes.get(NodeName(node.metadata.name))
        without_agent = "" if known is not None and known.enforces else "no agent sets cpusets there"
        return vmi.obstacle_on(node, here) or without_agent

    return planning.closed_where(obstacle_on)


def _obstacle(vm: VmView, vmi: RunningVmi | None, node: NodeView) -> str:
    """State why a VM does not move at all, as a clause about several VMs; empty if it may."""
    if vm.is_vmi and vmi is None:
        return "their VirtualMachineInstances are unknown"
    asking = vm.pod.asking if vmi is None else vmi.asking
    why = obstacle_to_moves(vm, node, asking)
    has_devices = vm.request is not None and vm.request.request.devices
    return why or ("they have devices of the host" if has_devices else "")


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text or "1970-01-01T00:00:00Z")
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
