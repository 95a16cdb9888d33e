"""A cluster in this process, with the API server's rules about pods, nodes and ledgers.

The demo and the tests run on it, so it refuses what an API server refuses: a write on a stale resource
version, a second binding, a CPU that changes hands. One contract suite runs against both. It answers at once,
but every call first lets other tasks run, so that races show up here, too.

Below the calls of a client stand those of whoever plays users, kubelet and agent.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from kvplace.core.annotations import REQUEST
from kvplace.core.cpu_map import CPU_MAP
from kvplace.core.errors import BadTopology, Conflict, Refused
from kvplace.core.ledger import Ledger, LedgerChange, OwnershipConflict
from kvplace.core.placement import PLACEMENT
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.core.topology_document import read_topology
from kvplace.kube.events import EventRecord
from kvplace.kube.faults import FaultScript, Operation
from kvplace.kube.object_log import ObjectLog
from kvplace.kube.records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.kube.watches import (
    EVERYTHING,
    LEDGERS,
    NODES,
    PLACED_PODS,
    PODS,
    TOPOLOGIES,
    Kind,
    Selector,
    WatchEvent,
)

K = TypeVar("K")
R = TypeVar("R")


class MemoryCluster:
    """An API server's worth of rules over dictionaries."""

    def __init__(self) -> None:
        self.faults = FaultScript()
        self.events: list[EventRecord] = []
        self._versions = itertools.count(1)
        self._serials = itertools.count(1)
        self._pods = ObjectLog(PODS)
        self._nodes = ObjectLog(NODES)
        self._topologies = ObjectLog(TOPOLOGIES)
        self._ledgers = ObjectLog(LEDGERS)
        self._logs: Mapping[Kind[Any, Any], ObjectLog[Any]] = {
            PODS: self._pods,
            NODES: self._nodes,
            TOPOLOGIES: self._topologies,
            LEDGERS: self._ledgers,
        }
        self._gated: set[str] = set()
        self._pod_annotations: dict[str, dict[str, str]] = {}
        self._node_annotations: dict[str, dict[str, str]] = {}
        self._vmis: dict[tuple[str, str], Mapping[str, Any]] = {}

    # The calls of a client.

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        selector.check(kind)
        return cast(ObjectLog[R], self._logs[kind]).watch(selector)

    async def bind(
        self, namespace: str, pod: str, uid: PodUid, node: NodeName, annotations: Mapping[str, str]
    ) -> None:
        late = await self._begin(Operation.BIND)
        record = self._pod(namespace, pod)
        where = f"pod {namespace}/{pod}"
        if record.uid != uid:
            raise Conflict(f"{where} has UID {record.uid}, not {uid}: it was made anew under the same name")
        if record.deleting:
            raise Conflict(f"{where} is being deleted and cannot be bound")
        if record.node:
            raise Conflict(f"{where} is already assigned to node {record.node!r}")
        if uid in self._gated:
            raise Conflict(f"{where} has non-empty .spec.schedulingGates")
        held = self._pod_annotations.setdefault(uid, {})
        held.update(annotations)
        self._put_pod(
            replace(
                record,
                node=node,
                unschedulable=False,
                placement=held.get(PLACEMENT, record.placement),
                cpu_map=held.get(CPU_MAP, record.cpu_map),
            )
        )
        await self.faults.after(late)

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        late = await self._begin(Operation.READ_POD)
        record = self._pods.get((namespace, name))
        await self.faults.after(late)
        return record

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        late = await self._begin(Operation.READ_VMI)
        document = self._vmis.get((namespace, name))
        await self.faults.after(late)
        return document

    async def read_ledger(self, node: NodeName) -> LedgerRecord | None:
        late = await self._begin(Operation.READ_LEDGER)
        record = self._ledgers.get(node)
        await self.faults.after(late)
        return record

    async def create_ledger(self, node: NodeName) -> LedgerRecord:
        late = await self._begin(Operation.CREATE_LEDGER)
        record = self._ledgers.get(node)
        if record is None:
            record = LedgerRecord(node, Ledger(), self._next_version(), uid=self._next_uid("ledger"))
            self._ledgers.put(node, record)
        await self.faults.after(late)
        return record

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        late = await self._begin(Operation.WRITE_LEDGER)
        stored = self._ledgers.get(before.node)
        if stored is None:
            raise Conflict(f"the ledger of node {before.node} is gone")
        if stored.resource_version != before.resource_version:
            raise Conflict(
                f"the ledger of node {before.node} has changed since it was read"
                f" (version {stored.resource_version}, not {before.resource_version})"
            )
        record = self._store_ledger(stored, stored.ledger.after(change))
        await self.faults.after(late)
        return record

    async def delete_ledger(self, before: LedgerRecord) -> None:
        late = await self._begin(Operation.DELETE_LEDGER)
        stored = self._ledgers.get(before.node)
        if stored is not None:
            if (stored.uid, stored.resource_version) != (before.uid, before.resource_version):
                raise Conflict(f"the ledger of node {before.node} has changed since it was read")
            if stored.ledger.owners:
                raise Conflict(f"the ledger of node {before.node} still has owners: release their CPUs first")
            self._ledgers.remove(before.node)
        await self.faults.after(late)

    async def record_event(self, event: EventRecord) -> None:
        late = await self._begin(Operation.RECORD_EVENT)
        self.events.append(event)
        await self.faults.after(late)

    async def annotate_node(self, node: NodeName, annotations: Mapping[str, str | None]) -> None:
        late = await self._begin(Operation.ANNOTATE_NODE)
        record = self._nodes.get(node)
        if record is None:
            raise Refused(f"node {node} is gone")
        held = self._node_annotations.setdefault(node, {})
        for key, value in annotations.items():
            if value is None:
                held.pop(key, None)
            else:
                held[key] = value
        self._nodes.put(
            node, replace(record, cpu_map=held.get(CPU_MAP, ""), resource_version=self._next_version())
        )
        await self.faults.after(late)

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
        scheduler_name: str = "kvplace",
        node: str = "",
        gated: bool = False,
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> PodRecord:
        """Create a pod as it is after admission; raises Conflict when the name is taken.

        Without `labels` a pod with a request has the label that admission gives it.
        """
        if self._pods.get((namespace, name)) is not None:
            raise Conflict(f"pod {namespace}/{name} exists already")
        held = {**({REQUEST: request} if request else {}), **(annotations or {})}
        record = PodRecord(
            namespace=namespace,
            name=name,
            uid=PodUid(uid or self._next_uid("pod")),
            node=NodeName(node),
            scheduler_name=scheduler_name,
            request=held.get(REQUEST, ""),
            placement=held.get(PLACEMENT, ""),
            cpu_map=held.get(CPU_MAP, ""),
            vmi=vmi,
            vmi_uid=vmi_uid or (f"vmi-{vmi}" if vmi else ""),
        )
        self._pod_annotations[record.uid] = held
        if gated:
            self._gated.add(record.uid)
        if labels is None:
            labels = PLACED_PODS.labels if record.request else {}
        return self._put_pod(record, labels)

    def label_pod(self, namespace: str, name: str, labels: Mapping[str, str | None]) -> PodRecord:
        """Set labels of a pod, None removes one; others stay."""
        record = self._pod(namespace, name)
        changed = {**self._pods.labels((namespace, name)), **labels}
        return self._put_pod(record, {key: value for key, value in changed.items() if value is not None})

    def change_pod(
        self,
        namespace: str,
        name: str,
        *,
        phase: str | None = None,
        compute_terminated: bool | None = None,
        unschedulable: bool | None = None,
        gated: bool | None = None,
    ) -> PodRecord:
        """Change a pod's status or gate, as kubelet, scheduler and users do; None leaves a thing as it is."""
        record = self._pod(namespace, name)
        if gated is not None:
            (self._gated.add if gated else self._gated.discard)(record.uid)
        return self._put_pod(
            replace(
                record,
                phase=record.phase if phase is None else phase,
                compute_terminated=record.compute_terminated
                if compute_terminated is None
                else compute_terminated,
                unschedulable=record.unschedulable if unschedulable is None else unschedulable,
            )
        )

    def set_pod_phase(self, namespace: str, name: str, phase: str) -> PodRecord:
        """Set a pod's phase, as the kubelet does."""
        return self.change_pod(namespace, name, phase=phase)

    def pod_annotations(self, namespace: str, name: str) -> Mapping[str, str]:
        """Answer all annotations of a pod."""
        return dict(self._pod_annotations[self._pod(namespace, name).uid])

    def node_annotations(self, node: str) -> Mapping[str, str]:
        """Answer all annotations of a node."""
        return dict(self._node_annotations[node])

    def delete_pod(self, namespace: str, name: str, *, force: bool = False) -> None:
        """Delete a pod: one that is bound stays, marked, until the kubelet is done (`force` plays that)."""
        record = self._pod(namespace, name)
        if record.node and not force and record.phase not in ("Succeeded", "Failed"):
            if not record.deleting:
                self._put_pod(replace(record, deleting=True))
            return
        self._pods.remove((namespace, name))
        self._pod_annotations.pop(record.uid, None)
        self._gated.discard(record.uid)

    def create_node(
        self, name: str, *, cpu_map: str = "", unschedulable: bool = False, topology: Topology | None = None
    ) -> NodeRecord:
        """Create or replace a node, with the topology that its agent reports if given."""
        known = self._nodes.get(name)
        record = NodeRecord(
            NodeName(name),
            uid=known.uid if known else self._next_uid("node"),
            unschedulable=unschedulable,
            cpu_map=cpu_map,
            resource_version=self._next_version(),
        )
        self._node_annotations[name] = {CPU_MAP: cpu_map} if cpu_map else {}
        self._nodes.put(name, record)
        if topology is not None:
            self.put_topology(name, topology)
        return record

    def delete_node(self, name: str) -> None:
        """Delete a node; its topology and ledger stay, as they do in a cluster."""
        self._nodes.remove(name)
        self._node_annotations.pop(name, None)

    def put_topology(self, node: str, topology: Topology, *, kubelet_cpus: int = 0) -> None:
        """Publish a node's machine, and what the kubelet's static policy holds of it, as its agent does."""
        version = self._next_version()
        record = TopologyRecord(
            NodeName(node), topology, kubelet_cpus=CpuMask(kubelet_cpus), resource_version=version
        )
        self._topologies.put(node, record)

    def put_topology_document(self, node: str, document: object) -> None:
        """Publish a machine as JSON, readable or not."""
        try:
            topology, problem = read_topology(document), ""
        except BadTopology as error:
            topology, problem = None, str(error)
        self._topologies.put(
            node, TopologyRecord(NodeName(node), topology, problem, resource_version=self._next_version())
        )

    def delete_topology(self, node: str) -> None:
        self._topologies.remove(node)

    def put_vmi(self, namespace: str, name: str, document: Mapping[str, Any]) -> None:
        """Create or replace a VirtualMachineInstance."""
        self._vmis[namespace, name] = document

    def delete_vmi(self, namespace: str, name: str) -> None:
        self._vmis.pop((namespace, name), None)

    def put_ledger(self, node: str, ledger: Ledger) -> LedgerRecord:
        """Write a whole ledger without a resource version, as a foreign client may; its rule still holds."""
        stored = self._ledgers.get(node)
        if stored is None:
            stored = LedgerRecord(NodeName(node), Ledger(), "", uid=self._next_uid("ledger"))
        return self._store_ledger(stored, ledger)

    def compact(self, kind: Kind[Any, Any]) -> None:
        """Forget the past of a kind: watchers that lag behind list anew."""
        self._logs[kind].compact()

    def drop_watches(self, kind: Kind[Any, Any]) -> None:
        """Break every watch of a kind and forget the past: all watchers list anew."""
        self._logs[kind].relist_all()

    def pause_watches(self, kind: Kind[Any, Any]) -> None:
        """Deliver nothing more of a kind until `resume_watches`: caches grow stale."""
        self._logs[kind].pause()

    def resume_watches(self, kind: Kind[Any, Any]) -> None:
        self._logs[kind].resume()

    # Inside.

    async def _begin(self, operation: Operation) -> Any:
        await asyncio.sleep(0)
        return await self.faults.before(operation)

    def _pod(self, namespace: str, name: str) -> PodRecord:
        record = self._pods.get((namespace, name))
        if record is None:
            raise Refused(f"pod {namespace}/{name} is gone")
        return record

    def _put_pod(self, record: PodRecord, labels: Mapping[str, str] | None = None) -> PodRecord:
        record = replace(record, resource_version=self._next_version())
        self._pods.put((record.namespace, record.name), record, labels)
        return record

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
        serial = next(self._serials)
        return f"{what}-{serial:08d}"
