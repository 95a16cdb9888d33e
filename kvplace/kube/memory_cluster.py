"""A cluster in this process, with the API server's rules about pods, nodes and ledgers.

The demo and the tests run on it, so it refuses what an API server refuses: a write on a stale resource
version, a second binding, a CPU that changes hands. One contract suite runs against both. It answers at once,
but every call first lets other tasks run, so that races show up here, too.

Below the calls of a client are calls that play users, kubelet and agent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from kvplace.core.cluster.victims import DisruptionBudget
from kvplace.core.errors import Conflict, Forbidden, Refused
from kvplace.core.ledger import Ledger, LedgerChange, OwnershipConflict
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import CPU_MAP, PLACEMENT, REQUEST
from kvplace.kube.claimed_cpus import with_status
from kvplace.kube.events import EventRecord
from kvplace.kube.memory_migrations import MemoryMigrations
from kvplace.kube.migrations import MIGRATIONS
from kvplace.kube.object_log import ObjectLog
from kvplace.kube.object_records import (
    NO_SHAPE,
    AgentPod,
    Condition,
    LedgerRecord,
    NodeRecord,
    PodRecord,
    PodReport,
    ResourceClaimRecord,
    ResourceTopologyRecord,
    TopologyRecord,
    TopologyStatus,
    VmiRecord,
)
from kvplace.kube.watches import (
    AGENT_PODS,
    AGENTS,
    DEVICE_CLASSES,
    EDITED_VMIS,
    EVERYTHING,
    LEDGERS,
    NODE_STATUSES,
    NODES,
    PLACED_PODS,
    PODS,
    RESOURCE_CLAIMS,
    SLICES,
    TOPOLOGIES,
    VMIS,
    Kind,
    Selector,
    WatchEvent,
)

K = TypeVar("K")
R = TypeVar("R")


class MemoryCluster(MemoryMigrations):
    """An API server's worth of rules over dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[EventRecord] = []
        self.topology_statuses: dict[NodeName, TopologyStatus] = {}
        """The status of each NodeTopology as its agent has written it last."""
        self._versions = itertools.count(1)
        self._serials = itertools.count(1)
        self._pods = ObjectLog(PODS)
        self._nodes = ObjectLog(NODES)
        self._topologies = ObjectLog(TOPOLOGIES)
        self._ledgers = ObjectLog(LEDGERS)
        self._edited_vmis = ObjectLog(VMIS)
        self._agents = ObjectLog(AGENT_PODS)
        self._resource_claims = ObjectLog(RESOURCE_CLAIMS)
        self._slices = ObjectLog(SLICES)
        self._device_classes = ObjectLog(DEVICE_CLASSES)
        self._logs: Mapping[Kind[Any, Any], ObjectLog[Any]] = {
            PODS: self._pods,
            NODES: self._nodes,
            NODE_STATUSES: self._nodes,
            TOPOLOGIES: self._topologies,
            LEDGERS: self._ledgers,
            VMIS: self._edited_vmis,
            AGENT_PODS: self._agents,
            RESOURCE_CLAIMS: self._resource_claims,
            SLICES: self._slices,
            DEVICE_CLASSES: self._device_classes,
            MIGRATIONS: self.migrations,
        }
        self._pod_annotations: dict[str, dict[str, str]] = {}
        self._node_annotations: dict[str, dict[str, str]] = {}
        self.serves_resource_topologies = True
        """Whether the kind NodeResourceTopology has been installed."""
        self._resource_topologies: dict[NodeName, tuple[ResourceTopologyRecord, Mapping[str, Any]]] = {}
        self._vmis: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.quota: int | None = None
        """The most millicores that a pod may request; None: any number."""
        self.disruption_budgets: list[DisruptionBudget] = []
        """The PodDisruptionBudgets as their controller has counted them last."""

    # The calls of a client.

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        selector.check(kind)
        return cast(ObjectLog[R], self._logs[kind]).watch(selector)

    async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
        await asyncio.sleep(0)
        selector.check(kind)
        return cast(ObjectLog[R], self._logs[kind]).selected(selector)

    async def bind(
        self, namespace: str, pod: str, uid: PodUid, node: NodeName, annotations: Mapping[str, str]
    ) -> None:
        await asyncio.sleep(0)
        record = self._pod(namespace, pod)
        where = f"pod {namespace}/{pod}"
        if record.uid != uid:
            raise Conflict(f"{where} has UID {record.uid}, not {uid}: it was created again")
        if record.deleting:
            raise Conflict(f"{where} is being deleted and cannot be bound")
        if record.node:
            raise Conflict(f"{where} is already assigned to node {record.node!r}")
        held = self._pod_annotations.setdefault(uid, {})
        held.update(annotations)
        self._put_pod(
            replace(
                record,
                node=node,
                placement=held.get(PLACEMENT, record.placement),
                cpu_map=held.get(CPU_MAP, record.cpu_map),
                nominated=NodeName(""),
            )
        )

    async def replace_placement(
        self, namespace: str, pod: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        await asyncio.sleep(0)
        record = self._pod(namespace, pod)
        where = f"pod {namespace}/{pod}"
        if record.uid != uid:
            raise Refused(f"{where} has UID {record.uid}, not {uid}: it was created again")
        stored = PodPlacement.from_json(record.placement).revision if record.placement else 0
        text = annotations[PLACEMENT] or ""
        written = PodPlacement.from_json(text)
        if text != record.placement and (
            written.revision != stored + 1 or written.pod_uid != uid or written.node != record.node
        ):
            raise Conflict(f"{where} has revision {stored} of its placement, {written.revision} is not next")
        held = self._pod_annotations.setdefault(uid, {})
        for key, value in annotations.items():
            held.pop(key, None)
            if value is not None:
                held[key] = value
        self._put_pod(replace(record, placement=text, cpu_map=held.get(CPU_MAP, "")))

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        await asyncio.sleep(0)
        return self._pods.get((namespace, name))

    async def read_disruption_budgets(self) -> tuple[DisruptionBudget, ...]:
        await asyncio.sleep(0)
        return tuple(self.disruption_budgets)

    async def set_pod_condition(self, pod: PodRecord, condition: Condition) -> None:
        await asyncio.sleep(0)
        stored = self._pod(pod.namespace, pod.name)
        if stored.uid != pod.uid:
            raise Refused(f"pod {pod.namespace}/{pod.name} with UID {pod.uid} is gone")
        others = (known for known in stored.conditions if known.type != condition.type)
        self._put_pod(replace(stored, conditions=(*others, condition)))

    async def request_cpus(self, pod: PodRecord, millicores: int) -> None:
        await asyncio.sleep(0)
        stored = self._pod(pod.namespace, pod.name)
        if stored.uid != pod.uid:
            raise Refused(f"pod {pod.namespace}/{pod.name} with UID {pod.uid} is gone")
        if self.quota is not None and millicores > self.quota:
            raise Forbidden(f"exceeded quota, limited: requests.cpu={self.quota}m")
        self._put_pod(replace(stored, resources={**stored.resources, "cpu": millicores}))

    async def nominate_node(self, pod: PodRecord, node: NodeName) -> None:
        await asyncio.sleep(0)
        stored = self._pod(pod.namespace, pod.name)
        if (stored.uid, stored.resource_version) != (pod.uid, pod.resource_version):
            raise Conflict(f"pod {pod.namespace}/{pod.name} has changed since it was read")
        self._put_pod(replace(stored, nominated=node))

    async def write_topology(
        self, node: NodeRecord, topology: Topology, before: TopologyRecord | None
    ) -> str:
        await asyncio.sleep(0)
        stored = self._topologies.get(node.name)
        if (stored and stored.resource_version) != (before and before.resource_version):
            raise Conflict(f"the NodeTopology of node {node.name} has changed since it was read")
        stored = stored or TopologyRecord(node.name, None)
        generation = stored.generation + (topology != stored.topology)
        return self._put_topology(
            replace(stored, topology=topology, problem="", generation=generation, by_agent=True)
        )

    async def write_topology_status(self, node: NodeName, status: TopologyStatus, version: str) -> str:
        await asyncio.sleep(0)
        stored = self._topologies.get(node)
        if stored is None:
            raise Refused(f"the NodeTopology of node {node} is gone")
        if stored.resource_version != version:
            raise Conflict(f"the NodeTopology of node {node} has changed since it was read")
        self.topology_statuses[node] = status
        return self._put_topology(
            replace(
                stored,
                kubelet_cpus=status.kubelet_cpus,
                in_use=status.in_use,
                devices=status.devices,
                enforcement=status.enforcement,
                pods={pod.uid: pod for pod in status.pods},
                conditions=status.conditions,
                observed_generation=status.observed_generation,
            )
        )

    async def read_resource_topology(self, node: NodeName) -> ResourceTopologyRecord | None:
        await asyncio.sleep(0)
        found = self._resource_topologies.get(node)
        return None if found is None else found[0]

    async def write_resource_topology(
        self, node: NodeRecord, document: Mapping[str, Any], before: ResourceTopologyRecord | None
    ) -> ResourceTopologyRecord:
        stored = await self.read_resource_topology(node.name)
        if not self.serves_resource_topologies:
            raise Refused("the cluster has no NodeResourceTopologies")
        if (stored and stored.resource_version) != (before and before.resource_version):
            raise Conflict(f"the NodeResourceTopology of node {node.name} has changed since it was read")
        record = ResourceTopologyRecord(node.name, self._next_version(), by_agent=True)
        self._resource_topologies[node.name] = (record, document)
        return record

    async def annotate_node(self, node: NodeName, annotations: Mapping[str, str | None]) -> None:
        await asyncio.sleep(0)
        record = self._nodes.get(node)
        if record is None:
            raise Refused(f"node {node} is gone")
        held = {**self.node_annotations(node), **annotations}
        self._node_annotations[node] = {key: value for key, value in held.items() if value is not None}
        self._nodes.put(
            node,
            replace(
                record,
                cpu_map=self._node_annotations[node].get(CPU_MAP, ""),
                cpu_map_by_agent=record.cpu_map_by_agent or CPU_MAP in annotations,
                resource_version=self._next_version(),
            ),
        )

    async def read_resource_claim(self, namespace: str, name: str) -> ResourceClaimRecord | None:
        await asyncio.sleep(0)
        return self._resource_claims.get((namespace, name))

    async def write_claim_status(self, claim: ResourceClaimRecord, status: Mapping[str, Any]) -> str:
        await asyncio.sleep(0)
        stored = self._resource_claims.get((claim.namespace, claim.name))
        if stored is None or stored.resource_version != claim.resource_version:
            raise Conflict(f"ResourceClaim {claim.name} has changed since it was read")
        return self.put_resource_claim(with_status(stored, status))

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        await asyncio.sleep(0)
        return self._vmis.get((namespace, name))

    async def read_ledger(self, node: NodeName) -> LedgerRecord | None:
        await asyncio.sleep(0)
        return self._ledgers.get(node)

    async def create_ledger(self, node: NodeName) -> LedgerRecord:
        await asyncio.sleep(0)
        record = self._ledgers.get(node)
        if record is None:
            record = LedgerRecord(node, Ledger(), self._next_version(), uid=self._next_uid("ledger"))
            self._ledgers.put(node, record)
        return record

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        await asyncio.sleep(0)
        stored = self._ledgers.get(before.node)
        if stored is None:
            raise Conflict(f"the ledger of node {before.node} is gone")
        if stored.resource_version != before.resource_version:
            raise Conflict(
                f"the ledger of node {before.node} has changed since it was read"
                f" (version {stored.resource_version}, not {before.resource_version})"
            )
        return self._store_ledger(stored, stored.ledger.after(change))

    async def record_event(self, event: EventRecord) -> None:
        await asyncio.sleep(0)
        self.events.append(event)

    async def close(self) -> None:
        for log in self._logs.values():
            log.close()

    # What users, kubelet and agent do.

    def create_pod(
        self,
        name: str,
        *,
        namespace: str = "default",
        uid: str = "",
        request: str = "",
        vmi: str = "",
        vmi_uid: str = "",
        node: str = "",
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        shape: bytes = NO_SHAPE,
        priority: int = 0,
        resource_claims: tuple[str, ...] = (),
        resources: Mapping[str, int] | None = None,
        created: str = "",
        migration: str = "",
    ) -> PodRecord:
        """Create a pod as it is after admission; raises Conflict when the name is taken.

        Without `labels` a pod with a request has the label that admission gives it.
        """
        if self._pods.get((namespace, name)) is not None:
            raise Conflict(f"pod {namespace}/{name} exists already")
        held = {**({REQUEST: request} if request else {}), **(annotations or {})}
        if labels is None:
            labels = PLACED_PODS.labels if held.get(REQUEST) else {}
        record = PodRecord(
            namespace=namespace,
            name=name,
            uid=PodUid(uid or self._next_uid("pod")),
            node=NodeName(node),
            request=held.get(REQUEST, ""),
            placement=held.get(PLACEMENT, ""),
            cpu_map=held.get(CPU_MAP, ""),
            vmi=vmi,
            vmi_uid=vmi_uid or (f"vmi-{vmi}" if vmi else ""),
            shape=shape,
            priority=priority,
            resource_claims=resource_claims,
            labels=json.dumps(dict(labels)),
            resources=resources or {},
            created=created,
            migration=migration,
        )
        self._pod_annotations[record.uid] = held
        return self._put_pod(record, labels)

    def pod_annotations(self, namespace: str, name: str) -> Mapping[str, str]:
        """Return all annotations of a pod."""
        return dict(self._pod_annotations[self._pod(namespace, name).uid])

    def put_resource_topology(self, name: str, document: Mapping[str, Any]) -> None:
        """Create or replace a NodeResourceTopology, as another writer than the agent does."""
        record = ResourceTopologyRecord(NodeName(name), self._next_version(), by_agent=False)
        self._resource_topologies[record.node] = (record, document)

    def resource_topology(self, name: str) -> Mapping[str, Any] | None:
        """Return a NodeResourceTopology as it was written."""
        found = self._resource_topologies.get(NodeName(name))
        return None if found is None else found[1]

    def node_annotations(self, name: str) -> Mapping[str, str]:
        """Return all annotations of a node."""
        record = self._nodes.get(name)
        described = {CPU_MAP: record.cpu_map} if record is not None and record.cpu_map else {}
        return self._node_annotations.get(name, described)

    def create_node(self, name: str, *, cpu_map: str = "", topology: Topology | None = None) -> NodeRecord:
        """Create or replace a node, with the topology that its agent reports if given."""
        known = self._nodes.get(name)
        record = NodeRecord(
            NodeName(name),
            uid=known.uid if known else self._next_uid("node"),
            cpu_map=cpu_map,
            resource_version=self._next_version(),
        )
        self._nodes.put(name, record)
        if topology is not None:
            self.put_topology(name, topology)
        return record

    def put_topology(
        self,
        node: str,
        topology: Topology,
        *,
        kubelet_cpus: int = 0,
        enforcement: Enforcement = Enforcement.NONE,
        pods: Iterable[PodReport] = (),
        conditions: Iterable[Condition] = (),
        by_agent: bool = False,
        devices: DeviceReport | None = None,
    ) -> None:
        """Publish a node's machine, and the CPUs of the kubelet's static policy, as its agent does."""
        self._put_topology(
            TopologyRecord(
                NodeName(node),
                topology,
                kubelet_cpus=CpuMask(kubelet_cpus),
                enforcement=enforcement,
                pods={report.uid: report for report in pods},
                by_agent=by_agent,
                conditions=tuple(conditions),
                devices=devices,
            )
        )

    def put_agent_pod(self, node: str, *, is_ready: bool = True) -> None:
        """Let the DaemonSet run the agent on a node."""
        uid = PodUid(f"agent-{node}")
        self._agents.put(uid, AgentPod(uid, NodeName(node), is_ready), AGENTS.labels)

    def delete_agent_pod(self, node: str) -> None:
        """Take the agent away from a node."""
        self._agents.remove(PodUid(f"agent-{node}"))

    def put_resource_claim(self, record: ResourceClaimRecord) -> str:
        """Create or replace a ResourceClaim, as users and kube-scheduler do; returns its version."""
        version = self._next_version()
        self._resource_claims.put((record.namespace, record.name), replace(record, resource_version=version))
        return version

    def put_vmi(self, namespace: str, name: str, document: Mapping[str, Any]) -> None:
        """Create or replace a VirtualMachineInstance."""
        self._vmis[namespace, name] = document

    def edit_vmi(self, namespace: str, name: str, uid: str, asking: Mapping[str, str]) -> None:
        """Edit the asking annotations of a running VMI, as its owner does and admission then marks it."""
        record = VmiRecord(namespace, name, uid, dict(asking), self._next_version())
        self._edited_vmis.put((namespace, name), record, EDITED_VMIS.labels)

    async def annotate_vm(self, pod: PodRecord, key: str, value: str | None) -> None:
        await asyncio.sleep(0)
        written = {**(self._edited_vmis.get((pod.namespace, pod.vmi)) or pod).asking, key: value}
        asking = {name: text for name, text in written.items() if text is not None}
        if pod.vmi:
            self.edit_vmi(pod.namespace, pod.vmi, pod.vmi_uid, asking)
        else:
            self.edit_pod(pod.namespace, pod.name, asking)

    def edit_pod(self, namespace: str, name: str, asking: Mapping[str, str]) -> None:
        """Edit the asking annotations of a plain pod."""
        self._put_pod(replace(self._pod(namespace, name), asking=dict(asking)))

    # Inside.

    def _pod(self, namespace: str, name: str) -> PodRecord:
        record = self._pods.get((namespace, name))
        if record is None:
            raise Refused(f"pod {namespace}/{name} is gone")
        return record

    def _put_pod(self, record: PodRecord, labels: Mapping[str, str] | None = None) -> PodRecord:
        record = replace(record, resource_version=self._next_version())
        self._pods.put((record.namespace, record.name), record, labels)
        return record

    def _put_topology(self, record: TopologyRecord) -> str:
        version = self._next_version()
        self._topologies.put(record.node, replace(record, resource_version=version))
        return version

    def _store_ledger(self, stored: LedgerRecord, after: Ledger) -> LedgerRecord:
        for cpu, owner in after.owners.items():
            holder = stored.ledger.owners.get(cpu, owner)
            if holder != owner:
                raise OwnershipConflict(
                    f"node {stored.node}: CPU {cpu} belongs to pod {holder} and must be released"
                    f" before pod {owner} can own it"
                )
        record = replace(stored, ledger=after, resource_version=self._next_version())
        self._ledgers.put(stored.node, record)
        return record

    def _next_version(self) -> str:
        return str(next(self._versions))

    def _next_uid(self, what: str) -> str:
        return f"{what}-{next(self._serials):08d}"
