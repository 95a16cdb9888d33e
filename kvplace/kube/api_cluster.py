"""A Kubernetes cluster behind an API server: each call of kvplace as requests.

`MemoryCluster` offers the same calls, and one contract suite runs against both. Components declare protocols
with the few of them that they make. Every write is one request, and answers are asked for in their shortest
form: on a busy cluster the API server's CPU limits the binds per second. Errors are those of core:

    Conflict              another writer was faster; read again and decide again
      OwnershipConflict   a CPU would go from one pod to another
    Refused               the object is gone
    Unavailable           no answer, or an unclear one; the outcome of a write is UNKNOWN then: read before
                          trying again
    Forbidden             the rights in manifests/ are not in place
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvplace.core.cluster.victims import DisruptionBudget
from kvplace.core.errors import Conflict, Refused
from kvplace.core.ledger import LedgerChange
from kvplace.core.node_topology import API_VERSION, GROUP, RESOURCE_TOPOLOGY_VERSION, topology_document
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.api_errors import NotFound, Rejected, decoded
from kvplace.kube.api_records import ApiRecords, ListForm, RecordReader
from kvplace.kube.calls import JSON, METADATA_ONLY, STRATEGIC_MERGE_PATCH, ApiCall
from kvplace.kube.custom_objects import (
    TopologyReader,
    ledger_record,
    new_ledger,
    resource_topology_record,
    write_ledger_call,
)
from kvplace.kube.events import EventRecord
from kvplace.kube.migrations import MIGRATIONS, PlannedMigration
from kvplace.kube.node_filters import RUNNING_VMIS, SCHEDULABLE_NODES, RunningVmi, SchedulableNode
from kvplace.kube.object_client import ObjectClient
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
from kvplace.kube.objects import (
    COMPUTE,
    BudgetObject,
    MigrationObject,
    NodeRow,
    PodObject,
    RawObject,
    agent_pod_record,
    disruption_budget,
    migration_record,
    node_of_row,
    node_record,
    pod_record,
    vmi_record,
)
from kvplace.kube.reported_vms import VM_READERS
from kvplace.kube.resource_claims import DRA_READERS, RESOURCE_CLAIM, resource_claim_record
from kvplace.kube.session import Session
from kvplace.kube.watches import (
    AGENT_PODS,
    LEDGERS,
    NODE_STATUSES,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    TOPOLOGIES,
    VMIS,
    ApiKind,
    Kind,
)

_IMMUTABLE_UID = "metadata.uid: Invalid value"
"""In the refusal of a patch of pods/status that names another UID."""


class ApiCluster(ApiRecords):
    """A cluster behind an API server."""

    def __init__(
        self,
        session: Session,
        *,
        component: str = "kvplace",
        page_size: int = 250,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`component` names the writer, kvplace.io/COMPONENT on events; `now` dates events.

        Lists are read in pages of `page_size` objects.
        """
        readers = {**_READERS, TOPOLOGIES: RecordReader.of(_RAW, TopologyReader().record)}
        writer = component if component == "kvplace" else f"kvplace-{component}"
        super().__init__(session, readers, writer=writer, page_size=page_size)
        self._controller = f"{GROUP}/{component}"
        self._instance = (os.environ.get("POD_NAME") or socket.gethostname())[:128]
        self._now = now

    async def bind(
        self, namespace: str, pod: str, uid: PodUid, node: NodeName, annotations: Mapping[str, str]
    ) -> None:
        """Bind a pod and put annotations on it, in one write.

        Raises Conflict when the pod is bound, being deleted, gated or another one than `uid`, Refused when it
        is gone, and Unavailable when the outcome is unknown. Does not check that the node exists.
        """
        metadata = {"name": pod, "namespace": namespace, "uid": uid, "annotations": dict(annotations)}
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        call = ApiCall.on("create", PODS.api, pod, "binding", namespace=namespace, document=binding)
        # Once: only the caller knows until when the claim behind it stays.
        await self._session.request(call, attempts=1)

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        """Read a pod as the API server has it now; None when there is none."""
        found = await self._session.read(PODS.api, name, _POD, namespace=namespace)
        return None if found is None else pod_record(found)

    async def read_resource_claim(self, namespace: str, name: str) -> ResourceClaimRecord | None:
        """Read a ResourceClaim as the API server has it now; None when there is none."""
        found = await self._session.read(RESOURCE_CLAIMS.api, name, RESOURCE_CLAIM, namespace=namespace)
        return None if found is None else resource_claim_record(found)

    async def write_claim_status(self, claim: ResourceClaimRecord, status: Mapping[str, Any]) -> str:
        """Change allocation and reservedFor of a ResourceClaim, None removes one; returns its new version.

        Raises Conflict when it has changed since `claim` was read, and Refused when it is gone.
        """
        change = {"metadata": {"resourceVersion": claim.resource_version}, "status": dict(status)}
        body = await self._write(
            "patch", RESOURCE_CLAIMS.api, claim.name, change, "status", namespace=claim.namespace
        )
        return _stored(body, RESOURCE_CLAIMS.api).metadata.resource_version

    async def read_disruption_budgets(self) -> tuple[DisruptionBudget, ...]:
        """Read all PodDisruptionBudgets of the cluster, page by page."""
        return await self._listed(_BUDGETS, _BUDGET).read_all()

    async def replace_placement(
        self, namespace: str, pod: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Write the next revision of a bound pod's placement, with its cpu-map, in one write.

        Raises Refused when the pod is gone or another one, and Conflict when the revision does not follow
        the stored one.
        """
        try:
            await self._annotate_pod(namespace, pod, uid, annotations)
        except Rejected as error:
            if _IMMUTABLE_UID in str(error):
                raise Refused(f"pod {namespace}/{pod} with UID {uid} is gone") from error
            raise Conflict(f"pod {namespace}/{pod}: {error}") from error

    async def set_pod_condition(self, pod: PodRecord, condition: Condition) -> None:
        """Set a condition in a pod's status; its transition time moves when `pod` has another status.

        Raises Refused when the pod is gone or another one.
        """
        known = pod.condition(condition.type)
        changed = known is None or known.status != condition.status
        document = condition.document(self._now() if changed else None)
        try:
            await self._patch_pod(pod, "status", {"uid": pod.uid}, {"status": {"conditions": [document]}})
        except Rejected as error:
            if _IMMUTABLE_UID in str(error):
                raise Refused(f"pod {pod.namespace}/{pod.name} with UID {pod.uid} is gone") from error
            raise

    async def request_cpus(self, pod: PodRecord, millicores: int) -> None:
        """Change the CPU request of the container with QEMU of a VM's pod.

        Quotas and kube-scheduler then count them. Raises Refused when the API server does not resize the pod,
        and Forbidden when a quota or a missing right does not allow it.
        """
        compute = {"name": COMPUTE, "resources": {"requests": {"cpu": f"{millicores}m"}}}
        try:
            await self._patch_pod(pod, "resize", {"uid": pod.uid}, {"spec": {"containers": [compute]}})
        except Rejected as error:
            raise Refused(str(error)) from error

    async def nominate_node(self, pod: PodRecord, node: NodeName) -> None:
        """Nominate a node for a pod that still equals `pod`; raises Conflict if it has changed.

        The resource version also keeps a nomination by another client.
        """
        still = {"uid": pod.uid, "resourceVersion": pod.resource_version}
        await self._patch_pod(pod, "status", still, {"status": {"nominatedNodeName": node}})

    async def write_topology(
        self, node: NodeRecord, topology: Topology, before: TopologyRecord | None
    ) -> str:
        """Create a node's NodeTopology, or replace the spec of the one that is still as `before` states.

        Returns its new resource version; raises Conflict when there is another one by now. The object is
        deleted together with the node.
        """
        spec = topology_document(topology)
        if before is not None:
            return await self._patch_topology(node.name, before.resource_version, {"spec": spec})
        metadata = _metadata_of_new(node)
        document = {"apiVersion": API_VERSION, "kind": "NodeTopology", "metadata": metadata, "spec": spec}
        body = await self._write("create", TOPOLOGIES.api, node.name, document)
        return _stored(body, TOPOLOGIES.api).metadata.resource_version

    async def write_topology_status(self, node: NodeName, status: TopologyStatus, version: str) -> str:
        """Replace the status of a NodeTopology that still has this resource version; returns the new one.

        Raises Conflict when it has changed, and Refused when it is gone.
        """
        return await self._patch_topology(node, version, {"status": status.document()}, "status")

    async def read_resource_topology(self, node: NodeName) -> ResourceTopologyRecord | None:
        """Read the writer of a NodeResourceTopology; None where there is none, or no such kind."""
        found = await self._session.read(_RESOURCE_TOPOLOGIES, node, _RAW, accept=METADATA_ONLY)
        return None if found is None else resource_topology_record(found)

    async def write_resource_topology(
        self, node: NodeRecord, document: Mapping[str, Any], before: ResourceTopologyRecord | None
    ) -> ResourceTopologyRecord:
        """Create a NodeResourceTopology, or replace the one that is still as `before` states.

        Raises Conflict when there is another one by now, and Refused when the cluster has no such kind.
        """
        verb, metadata = "create", _metadata_of_new(node)
        if before is not None:
            verb, metadata = "patch", {"resourceVersion": before.resource_version}
        document = {**document, "metadata": {**document["metadata"], **metadata}}
        body = await self._write(verb, _RESOURCE_TOPOLOGIES, node.name, document)
        return resource_topology_record(_stored(body, _RESOURCE_TOPOLOGIES))

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Read a VirtualMachineInstance as JSON; None when there is none."""
        return await self._session.read(VMIS.api, name, _MAPPING, namespace=namespace)

    async def pods_at(self, address: str, *, in_host_network: bool) -> tuple[str, ...]:
        """Name the pods with this first IP address that have not ended, as `namespace/name`."""
        network = f"spec.hostNetwork={str(in_host_network).lower()}"
        fields = f"status.podIP={address},{network},status.phase!=Succeeded,status.phase!=Failed"
        found = await ObjectClient(self._session).read_cached_list_as(RawObject, PODS.api, fields)
        return tuple(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in found)

    async def read_ledger(self, node: NodeName) -> LedgerRecord | None:
        """Read a ledger, as `LedgerClient` states."""
        found = await self._session.read(LEDGERS.api, node, _RAW)
        return None if found is None else ledger_record(found)

    async def create_ledger(self, node: NodeName) -> LedgerRecord:
        """Create an empty ledger, as `LedgerClient` states."""
        try:
            body = await self._write("create", LEDGERS.api, node, new_ledger(node), accept=JSON)
        except Conflict:
            there = await self.read_ledger(node)
            if there is None:
                raise
            return there
        return ledger_record(_stored(body, LEDGERS.api))

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        """Change a ledger, as `LedgerClient` states."""
        after = before.ledger.after(change)
        try:
            body = await self._session.request(write_ledger_call(before, change, after))
        except NotFound as error:
            raise Conflict(f"the ledger of node {before.node} is gone") from error
        stored = _stored(body, LEDGERS.api).metadata
        return LedgerRecord(before.node, after, stored.resource_version, stored.uid, is_whole=before.is_whole)

    async def delete_ledger(self, before: LedgerRecord) -> None:
        """Delete a ledger that still equals `before`; one that is gone already is not an error.

        Raises Conflict when it has changed, is another one, or still has owners.
        """
        still = {"resourceVersion": before.resource_version, "uid": before.uid}
        try:
            await self._delete(LEDGERS.api, before.node, still=still)
        except Rejected as error:
            raise Conflict(
                f"the ledger of node {before.node} still has owners: release their CPUs first"
            ) from error

    async def record_event(self, event: EventRecord) -> None:
        """Write one event."""
        document = event.document(controller=self._controller, instance=self._instance, now=self._now())
        about = event.regarding.name
        await self._write("create", _EVENTS, about, document, namespace=event.namespace)

    async def annotate_node(self, node: NodeName, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a node, None removes one; others stay. Raises Refused when the node is gone."""
        await self._write("patch", NODES.api, node, {"metadata": {"annotations": dict(annotations)}})

    async def annotate_vm(self, pod: PodRecord, key: str, value: str | None) -> None:
        """Write an annotation of the VMI of a pod, or of a plain pod; None removes it.

        Only users have the right, for `kvplace defragment`.
        """
        if not pod.vmi:
            await self._annotate_pod(pod.namespace, pod.name, pod.uid, {key: value})
            return
        change = {"metadata": {"uid": pod.vmi_uid, "annotations": {key: value}}}
        await self._write("patch", VMIS.api, pod.vmi, change, namespace=pod.namespace)

    async def create_migration(self, migration: PlannedMigration, *, dry_run: bool = False) -> None:
        """Create a live migration, or only ask whether KubeVirt would accept it.

        Raises Conflict when there is one of this name, and Rejected or Forbidden when KubeVirt refuses it.
        """
        name, namespace = migration.name, migration.namespace
        document = migration.document()
        await self._write("create", MIGRATIONS.api, name, document, namespace=namespace, dry_run=dry_run)

    async def delete_migration(self, namespace: str, name: str) -> None:
        """Delete a live migration: KubeVirt then removes its target pod, or aborts it.

        One that is gone already is not an error.
        """
        await self._delete(MIGRATIONS.api, name, namespace=namespace)

    async def close(self) -> None:
        """End all watches and connections."""
        await self._session.close()

    async def _patch_topology(
        self, node: NodeName, version: str, change: Mapping[str, Any], *subresource: str
    ) -> str:
        document = {"metadata": {"resourceVersion": version}, **change}
        body = await self._write("patch", TOPOLOGIES.api, node, document, *subresource)
        return _stored(body, TOPOLOGIES.api).metadata.resource_version

    async def _annotate_pod(
        self, namespace: str, pod: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Set annotations of the pod with this UID, None removes one; others stay."""
        change = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        await self._write("patch", PODS.api, pod, change, namespace=namespace)

    async def _patch_pod(
        self, pod: PodRecord, subresource: str, metadata: Mapping[str, str], change: Mapping[str, Any]
    ) -> None:
        """Change a subresource of the pod with this metadata; other entries of its lists stay."""
        document = {"metadata": metadata, **change}
        await self._write(
            "patch",
            PODS.api,
            pod.name,
            document,
            subresource,
            namespace=pod.namespace,
            patch_type=STRATEGIC_MERGE_PATCH,
        )


_POD = msgspec.json.Decoder(PodObject)
_BUDGETS = ApiKind("poddisruptionbudgets", "policy")
_BUDGET = RecordReader.of(msgspec.json.Decoder(BudgetObject), disruption_budget)
_EVENTS = ApiKind("events", "events.k8s.io")
_RESOURCE_TOPOLOGIES = ApiKind("noderesourcetopologies", *RESOURCE_TOPOLOGY_VERSION.split("/"))
"""The kind that other schedulers read about NUMA nodes."""
_RAW = msgspec.json.Decoder(RawObject)
_MAPPING = msgspec.json.Decoder(dict[str, Any])
_READERS: Mapping[Kind[Any, Any], RecordReader[Any]] = {
    PODS: RecordReader.of(_POD, pod_record),
    LEDGERS: RecordReader.of(_RAW, ledger_record),
    NODES: RecordReader.of(_RAW, node_record, ListForm.METADATA),
    NODE_STATUSES: RecordReader.of(msgspec.json.Decoder(NodeRow), node_of_row, ListForm.TABLE),
    VMIS: RecordReader.of(_RAW, vmi_record),
    AGENT_PODS: RecordReader.of(_POD, agent_pod_record),
    MIGRATIONS: RecordReader.of(msgspec.json.Decoder(MigrationObject), migration_record),
    RUNNING_VMIS: RecordReader(msgspec.json.Decoder(RunningVmi).decode),
    SCHEDULABLE_NODES: RecordReader(msgspec.json.Decoder(SchedulableNode).decode),
    **VM_READERS,
    **DRA_READERS,
}


def _stored(body: bytes, kind: ApiKind) -> RawObject:
    """Read the answer to a write."""
    return decoded(_RAW, body, kind.resource)


def _metadata_of_new(node: NodeRecord) -> dict[str, Any]:
    """Name a new object after a node; the API server deletes both together."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid}
    return {"name": node.name, "ownerReferences": [owner]}
