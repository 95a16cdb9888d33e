"""A cluster in this process, with the API server's rules about pods, nodes and ledgers.

The demo and the tests run on it, so it refuses the same as an API server: a write on a stale resource
version, a second binding, a CPU that changes hands. One contract suite runs against both. It answers at once,
but every call first lets other tasks run, so that races show up here, too. No VM migrates by itself: a test
that plays virt-controller takes the migrations and moves them on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from kvplace.core.cluster.victims import DisruptionBudget
from kvplace.core.errors import Conflict, Forbidden, Refused
from kvplace.core.ledger import Ledger, LedgerChange, OwnershipConflict
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import CPU_MAP, PLACEMENT
from kvplace.kube.events import EventRecord
from kvplace.kube.memory_objects import MemoryObjects, ObjectLog, with_status
from kvplace.kube.migrations import MigrationRecord, PlannedMigration
from kvplace.kube.object_records import (
    Condition,
    LedgerRecord,
    NodeRecord,
    PodRecord,
    ResourceClaimRecord,
    ResourceTopologyRecord,
    TopologyRecord,
    TopologyStatus,
)
from kvplace.kube.watches import (
    EVERYTHING,
    Kind,
    Selector,
    WatchEvent,
)

K = TypeVar("K")
R = TypeVar("R")


class MemoryCluster(MemoryObjects):
    """An API server's worth of rules over dictionaries."""

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

    async def pods_at(self, address: str, *, in_host_network: bool) -> tuple[str, ...]:
        await asyncio.sleep(0)
        return tuple(self.addresses.get((address, in_host_network), ()))

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

    async def create_migration(self, migration: PlannedMigration, *, dry_run: bool = False) -> None:
        await asyncio.sleep(0)
        key = (migration.namespace, migration.name)
        if self.migrations.get(key) is not None:
            raise Conflict(f"migration {migration.namespace}/{migration.name} exists already")
        if self.refuses_migrations:
            raise Forbidden(self.refuses_migrations)
        if not dry_run:
            self.migrates_to[migration.name] = migration
            record = MigrationRecord(*key, migration.vmi, created=self.time(), is_ours=True)
            self.migrations.put(key, record)

    async def delete_migration(self, namespace: str, name: str) -> None:
        await asyncio.sleep(0)
        self.migrations.remove((namespace, name))

    async def annotate_vm(self, pod: PodRecord, key: str, value: str | None) -> None:
        await asyncio.sleep(0)
        written = {**(self._edited_vmis.get((pod.namespace, pod.vmi)) or pod).asking, key: value}
        asking = {name: text for name, text in written.items() if text is not None}
        if pod.vmi:
            self.edit_vmi(pod.namespace, pod.vmi, pod.vmi_uid, asking)
        else:
            self.edit_pod(pod.namespace, pod.name, asking)

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
