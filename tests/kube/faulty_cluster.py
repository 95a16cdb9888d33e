"""The in-memory cluster with what only tests need: faults, stale watches, and everybody else who writes.

Everybody else is users, the kubelet, the scheduler, agents and foreign clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from kvplace.core.errors import BadTopology, Conflict
from kvplace.core.free_resources import MemoryInUse
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.node_topology import read_topology
from kvplace.core.scalars import ContainerId, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.events import EventRecord
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.migrations import PlannedMigration
from kvplace.kube.node_filters import RUNNING_VMIS, SCHEDULABLE_NODES
from kvplace.kube.object_records import (
    Condition,
    DeviceClassRecord,
    LedgerRecord,
    NodeRecord,
    PodRecord,
    ResourceClaimRecord,
    ResourceTopologyRecord,
    SliceRecord,
    TopologyRecord,
    TopologyStatus,
)
from kvplace.kube.watches import EVERYTHING, Kind, Selector
from tests.kube.faults import FaultScript, Operation
from tests.kube.played_vmis import PlayedVmis

K = TypeVar("K")
R = TypeVar("R")


class FaultyCluster(PlayedVmis, MemoryCluster):
    """A cluster whose calls fail, hang and lose their answers as its script states."""

    def __init__(self) -> None:
        super().__init__()
        self._logs = {
            **self._logs,
            RUNNING_VMIS: self.running_vmis,
            SCHEDULABLE_NODES: self.schedulable_nodes,
        }
        self.faults = FaultScript()
        self._gated: set[str] = set()

    async def bind(
        self, namespace: str, pod: str, uid: PodUid, node: NodeName, annotations: Mapping[str, str]
    ) -> None:
        async with self.faults.around(Operation.BIND):
            if uid in self._gated:
                await asyncio.sleep(0)
                raise Conflict(f"pod {namespace}/{pod} has non-empty .spec.schedulingGates")
            await super().bind(namespace, pod, uid, node, annotations)

    async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
        async with self.faults.around(Operation.READ_ALL):
            return await super().read_all(kind, selector)

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        async with self.faults.around(Operation.READ_POD):
            return await super().read_pod(namespace, name)

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        async with self.faults.around(Operation.READ_VMI):
            return await super().read_vmi(namespace, name)

    async def read_ledger(self, node: NodeName) -> LedgerRecord | None:
        async with self.faults.around(Operation.READ_LEDGER):
            return await super().read_ledger(node)

    async def create_ledger(self, node: NodeName) -> LedgerRecord:
        async with self.faults.around(Operation.CREATE_LEDGER):
            return await super().create_ledger(node)

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        async with self.faults.around(Operation.WRITE_LEDGER):
            return await super().write_ledger(before, change)

    async def write_claim_status(self, claim: ResourceClaimRecord, status: Mapping[str, Any]) -> str:
        async with self.faults.around(Operation.WRITE_CLAIM_STATUS):
            return await super().write_claim_status(claim, status)

    async def delete_ledger(self, before: LedgerRecord) -> None:
        async with self.faults.around(Operation.DELETE_LEDGER):
            await asyncio.sleep(0)
            stored = self._ledgers.get(before.node)
            if stored is None:
                return
            if (stored.uid, stored.resource_version) != (before.uid, before.resource_version):
                raise Conflict(f"the ledger of node {before.node} has changed since it was read")
            if stored.ledger.owners:
                raise Conflict(f"the ledger of node {before.node} still has owners: release their CPUs first")
            self._ledgers.remove(before.node)

    async def record_event(self, event: EventRecord) -> None:
        async with self.faults.around(Operation.RECORD_EVENT):
            await super().record_event(event)

    async def annotate_node(self, node: NodeName, annotations: Mapping[str, str | None]) -> None:
        async with self.faults.around(Operation.ANNOTATE_NODE):
            await super().annotate_node(node, annotations)

    async def replace_placement(
        self, namespace: str, pod: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        async with self.faults.around(Operation.REPLACE_PLACEMENT):
            await super().replace_placement(namespace, pod, uid, annotations)

    async def set_pod_condition(self, pod: PodRecord, condition: Condition) -> None:
        async with self.faults.around(Operation.SET_POD_CONDITION):
            await super().set_pod_condition(pod, condition)

    async def nominate_node(self, pod: PodRecord, node: NodeName) -> None:
        async with self.faults.around(Operation.NOMINATE_NODE):
            await super().nominate_node(pod, node)

    async def create_migration(self, migration: PlannedMigration, *, dry_run: bool = False) -> None:
        async with self.faults.around(Operation.CREATE_MIGRATION):
            await super().create_migration(migration, dry_run=dry_run)

    async def delete_migration(self, namespace: str, name: str) -> None:
        async with self.faults.around(Operation.DELETE_MIGRATION):
            await super().delete_migration(namespace, name)

    async def write_topology(
        self, node: NodeRecord, topology: Topology, before: TopologyRecord | None
    ) -> str:
        async with self.faults.around(Operation.WRITE_TOPOLOGY):
            return await super().write_topology(node, topology, before)

    async def write_topology_status(self, node: NodeName, status: TopologyStatus, version: str) -> str:
        async with self.faults.around(Operation.WRITE_TOPOLOGY_STATUS):
            return await super().write_topology_status(node, status, version)

    async def read_resource_topology(self, node: NodeName) -> ResourceTopologyRecord | None:
        async with self.faults.around(Operation.READ_RESOURCE_TOPOLOGY):
            return await super().read_resource_topology(node)

    async def write_resource_topology(
        self, node: NodeRecord, document: Mapping[str, Any], before: ResourceTopologyRecord | None
    ) -> ResourceTopologyRecord:
        async with self.faults.around(Operation.WRITE_RESOURCE_TOPOLOGY):
            return await super().write_resource_topology(node, document, before)

    # Watches.

    def compact(self, kind: Kind[Any, Any]) -> None:
        """Forget the past of a kind: watchers that lag behind list again."""
        self._logs[kind].compact()

    def drop_watches(self, kind: Kind[Any, Any]) -> None:
        """Break every watch of a kind and forget the past: all watchers list again."""
        self._logs[kind].relist_all()

    def pause_watches(self, kind: Kind[Any, Any]) -> None:
        """Deliver nothing more of a kind until `resume_watches`: caches grow stale."""
        self._logs[kind].pause()

    def resume_watches(self, kind: Kind[Any, Any]) -> None:
        self._logs[kind].resume()

    # Everybody else.

    def put_slice(self, record: SliceRecord) -> None:
        """Publish devices, as a DRA driver does."""
        self._slices.put(record.name, record)

    def put_device_class(self, record: DeviceClassRecord) -> None:
        """Create or replace a DeviceClass."""
        self._device_classes.put(record.name, record)

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
        compute_container: str | None = None,
        gated: bool | None = None,
        was_tried: bool | None = None,
        unschedulable: str | None = None,
        nominated: str | None = None,
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
                compute_container=record.compute_container
                if compute_container is None
                else ContainerId(compute_container),
                was_tried=record.was_tried if was_tried is None else was_tried,
                unschedulable=record.unschedulable if unschedulable is None else unschedulable,
                nominated=record.nominated if nominated is None else NodeName(nominated),
            )
        )

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

    def delete_node(self, name: str) -> None:
        """Delete a node; its topology and ledger stay, as they do in a cluster."""
        self._nodes.remove(name)
        self._node_annotations.pop(name, None)

    def use_memory(self, node: str, in_use: MemoryInUse) -> None:
        """Report memory that is used outside kvplace, as the agent of a node does."""
        stored = self._topologies.get(node)
        assert stored is not None
        self._put_topology(replace(stored, in_use=in_use))

    def put_topology_document(self, node: str, document: object) -> None:
        """Publish a machine as JSON, readable or not, as a person does: the status stays."""
        try:
            topology, problem = read_topology(document), ""
        except BadTopology as error:
            topology, problem = None, str(error)
        stored = self._topologies.get(node) or TopologyRecord(NodeName(node), None)
        self._put_topology(
            replace(
                stored,
                topology=topology,
                problem=problem,
                generation=stored.generation + 1,
                by_agent=False,
            )
        )

    def delete_topology(self, node: str) -> None:
        self._topologies.remove(node)

    def put_ledger(self, node: str, ledger: Ledger) -> LedgerRecord:
        """Write a whole ledger without a resource version, as a foreign client may; its rule still holds."""
        stored = self._ledgers.get(node)
        if stored is None:
            stored = LedgerRecord(NodeName(node), Ledger(), "", uid=self._next_uid("ledger"))
        return self._store_ledger(stored, ledger)
