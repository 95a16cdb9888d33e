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

import contextlib
import os
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from kvplace.core.cluster.victims import DisruptionBudget
from kvplace.core.errors import Conflict, Refused
from kvplace.core.ledger import LedgerChange
from kvplace.core.node_topology import GROUP, VERSION, topology_document
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube import custom_objects
from kvplace.kube.api_errors import NotFound, Rejected, decoded
from kvplace.kube.api_list_watch import ApiListWatch, ListForm, Resource
from kvplace.kube.api_migrations import (
    MIGRATION_RESOURCES,
    create_migration_call,
    delete_migration_call,
)
from kvplace.kube.custom_objects import TopologyReader, ledger_record, resource_topology_record
from kvplace.kube.events import EventRecord
from kvplace.kube.list_watch import ListWatch, follow
from kvplace.kube.migrations import PlannedMigration
from kvplace.kube.object_client import ApiKind, ObjectClient
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
    NodeRow,
    PodObject,
    RawObject,
    agent_pod_record,
    disruption_budget,
    node_of_row,
    node_record,
    pod_record,
    vmi_record,
)
from kvplace.kube.reported_vms import VM_RESOURCES
from kvplace.kube.resource_claims import (
    DRA_RESOURCES,
    read_resource_claim,
    read_resource_claim_call,
    write_claim_status_call,
)
from kvplace.kube.session import MERGE_PATCH, METADATA_ONLY, STRATEGIC_MERGE_PATCH, Call, Session, path_of
from kvplace.kube.watches import (
    AGENT_PODS,
    EVERYTHING,
    LEDGERS,
    NODE_STATUSES,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    TOPOLOGIES,
    VMIS,
    Kind,
    Selector,
    WatchEvent,
)

K = TypeVar("K")
R = TypeVar("R")

_IMMUTABLE_UID = "metadata.uid: Invalid value"
"""In the refusal of a patch of pods/status that names another UID."""
_ECHOES = 256
"""Writes to ledgers that are remembered until the watch brings them back."""


class ApiCluster:
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
        self._session = session
        self._page_size = page_size
        self._controller = f"{GROUP}/{component}"
        self._written_by = {"fieldManager": component if component == "kvplace" else f"kvplace-{component}"}
        self._instance = (os.environ.get("POD_NAME") or socket.gethostname())[:128]
        self._now = now
        self._resources: Mapping[Kind[Any, Any], Resource[Any]] = {
            PODS: Resource.of("pods", path_of("api", "v1", "pods"), _POD, pod_record),
            NODES: Resource.of(
                "nodes", path_of("api", "v1", "nodes"), _RAW, node_record, form=ListForm.METADATA
            ),
            NODE_STATUSES: Resource.of(
                "nodes", path_of("api", "v1", "nodes"), _NODE_ROW, node_of_row, form=ListForm.TABLE
            ),
            TOPOLOGIES: _custom(custom_objects.TOPOLOGY, TopologyReader().record),
            LEDGERS: _custom(custom_objects.LEDGER, self._ledger_record),
            VMIS: Resource.of(
                "virtualmachineinstances",
                path_of("apis", "kubevirt.io", "v1", "virtualmachineinstances"),
                _RAW,
                vmi_record,
            ),
            AGENT_PODS: Resource.of(AGENT_PODS.name, path_of("api", "v1", "pods"), _POD, agent_pod_record),
            **VM_RESOURCES,
            **MIGRATION_RESOURCES,
            **DRA_RESOURCES,
        }
        self._written: OrderedDict[tuple[str, str], LedgerRecord] = OrderedDict()

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        """Follow the selected objects of a kind, as `WatchClient` states."""
        session = self._session
        return follow(self.list_watch(kind, selector), pause=session.pause, closed=lambda: session.closed)

    def list_watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> ListWatch[R]:
        """Return the selected objects of a kind in the form that `follow` takes."""
        return self._list_watch(kind, selector)

    async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
        """Read all selected objects of a kind once, page by page; raises the errors of this module."""
        return await self._list_watch(kind, selector).read_all()

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
        path = _pod_path(namespace, pod, "binding")
        await self._session.request(
            Call("create", "pods/binding", path, name=f"{namespace}/{pod}", body=_encode(binding)),
            attempts=1,  # only the caller knows until when the claim behind it stays
        )

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        """Read a pod as the API server has it now; None when there is none."""
        body = await self._get("pods", _pod_path(namespace, name), name)
        return None if body is None else pod_record(decoded(_POD, body, "pods"))

    async def read_resource_claim(self, namespace: str, name: str) -> ResourceClaimRecord | None:
        """Read a ResourceClaim as the API server has it now; None when there is none."""
        try:
            body = await self._session.request(read_resource_claim_call(namespace, name))
        except NotFound:
            return None
        return read_resource_claim(body)

    async def write_claim_status(self, claim: ResourceClaimRecord, status: Mapping[str, Any]) -> str:
        """Change allocation and reservedFor of a ResourceClaim, None removes one; returns its new version.

        Raises Conflict when it has changed since `claim` was read, and Refused when it is gone.
        """
        body = await self._session.request(write_claim_status_call(claim, status))
        return decoded(_RAW, body, RESOURCE_CLAIMS.name).metadata.resource_version

    async def read_disruption_budgets(self) -> tuple[DisruptionBudget, ...]:
        """Read all PodDisruptionBudgets of the cluster, page by page."""
        return await ApiListWatch(self._session, _BUDGETS, EVERYTHING, page_size=self._page_size).read_all()

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
        body = await self._session.request(custom_objects.create_topology_call(node, spec, self._written_by))
        return decoded(_RAW, body, custom_objects.TOPOLOGY).metadata.resource_version

    async def write_topology_status(self, node: NodeName, status: TopologyStatus, version: str) -> str:
        """Replace the status of a NodeTopology that still has this resource version; returns the new one.

        Raises Conflict when it has changed, and Refused when it is gone.
        """
        return await self._patch_topology(node, version, {"status": status.document()}, "status")

    async def read_resource_topology(self, node: NodeName) -> ResourceTopologyRecord | None:
        """Read the writer of a NodeResourceTopology; None where there is none, or no such kind."""
        try:
            body = await self._session.request(custom_objects.read_resource_topology_call(node))
        except NotFound:
            return None
        return resource_topology_record(decoded(_RAW, body, custom_objects.RESOURCE_TOPOLOGY))

    async def write_resource_topology(
        self, node: NodeRecord, document: Mapping[str, Any], before: ResourceTopologyRecord | None
    ) -> ResourceTopologyRecord:
        """Create a NodeResourceTopology, or replace the one that is still as `before` states.

        Raises Conflict when there is another one by now, and Refused when the cluster has no such kind.
        """
        body = await self._session.request(
            custom_objects.write_resource_topology_call(node, document, before, self._written_by)
        )
        return resource_topology_record(decoded(_RAW, body, custom_objects.RESOURCE_TOPOLOGY))

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Read a VirtualMachineInstance as JSON; None when there is none."""
        body = await self._get("virtualmachineinstances", _vmi_path(namespace, name), name)
        if body is None:
            return None
        return decoded(_MAPPING, body, "virtualmachineinstances")

    async def pods_at(self, address: str, *, in_host_network: bool) -> tuple[str, ...]:
        """Name the pods with this first IP address that have not ended, as `namespace/name`."""
        network = f"spec.hostNetwork={str(in_host_network).lower()}"
        fields = f"status.podIP={address},{network},status.phase!=Succeeded,status.phase!=Failed"
        found = await ObjectClient(self._session).read_cached_list_as(RawObject, ApiKind("pods"), fields)
        return tuple(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in found)

    async def read_ledger(self, node: NodeName) -> LedgerRecord | None:
        """Read a ledger, as `LedgerClient` states."""
        try:
            body = await self._session.request(custom_objects.read_ledger_call(node))
        except NotFound:
            return None
        return ledger_record(decoded(_RAW, body, custom_objects.LEDGER))

    async def create_ledger(self, node: NodeName) -> LedgerRecord:
        """Create an empty ledger, as `LedgerClient` states."""
        try:
            body = await self._session.request(custom_objects.create_ledger_call(node))
        except Conflict:
            there = await self.read_ledger(node)
            if there is None:
                raise
            return there
        return ledger_record(decoded(_RAW, body, custom_objects.LEDGER))

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        """Change a ledger, as `LedgerClient` states."""
        after = before.ledger.after(change)
        try:
            body = await self._session.request(custom_objects.write_ledger_call(before, change, after))
        except NotFound as error:
            raise Conflict(f"the ledger of node {before.node} is gone") from error
        stored = decoded(_RAW, body, custom_objects.LEDGER).metadata
        written = LedgerRecord(
            before.node, after, stored.resource_version, stored.uid, is_whole=before.is_whole
        )
        self._written[written.uid, written.resource_version] = written
        if len(self._written) > _ECHOES:
            self._written.popitem(last=False)
        return written

    async def delete_ledger(self, before: LedgerRecord) -> None:
        """Delete a ledger that still equals `before`; one that is gone already is not an error.

        Raises Conflict when it has changed, is another one, or still has owners.
        """
        try:
            await self._session.request(custom_objects.delete_ledger_call(before))
        except NotFound:
            return
        except Rejected as error:
            raise Conflict(
                f"the ledger of node {before.node} still has owners: release their CPUs first"
            ) from error

    async def record_event(self, event: EventRecord) -> None:
        """Write one event."""
        await self._session.request(
            Call(
                "create",
                "events.events.k8s.io",
                path_of("apis", "events.k8s.io", "v1", "namespaces", event.namespace, "events"),
                name=event.regarding.name,
                body=_encode(
                    event.document(controller=self._controller, instance=self._instance, now=self._now())
                ),
                accept=METADATA_ONLY,
            )
        )

    async def annotate_node(self, node: NodeName, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a node, None removes one; others stay. Raises Refused when the node is gone."""
        body = {"metadata": {"annotations": dict(annotations)}}
        await self._patch("nodes", path_of("api", "v1", "nodes", node), node, body)

    async def create_migration(self, migration: PlannedMigration, *, dry_run: bool = False) -> None:
        """Create a live migration, or only ask whether KubeVirt would accept it.

        Raises Conflict when there is one of this name, and Rejected or Forbidden when KubeVirt refuses it.
        """
        await self._session.request(create_migration_call(migration, self._written_by, dry_run=dry_run))

    async def delete_migration(self, namespace: str, name: str) -> None:
        """Delete a live migration; one that is gone already is not an error."""
        with contextlib.suppress(NotFound):
            await self._session.request(delete_migration_call(namespace, name))

    async def close(self) -> None:
        """End all watches and connections."""
        await self._session.close()

    def _list_watch(self, kind: Kind[K, R], selector: Selector) -> ApiListWatch[R]:
        selector.check(kind)
        return ApiListWatch(self._session, self._resources[kind], selector, page_size=self._page_size)

    def _ledger_record(self, document: RawObject) -> LedgerRecord:
        """Read a watched ledger, unless it is the echo of a write of ours, as most are.

        Reading one takes longer than deciding on it.
        """
        metadata = document.metadata
        written = self._written.pop((metadata.uid, metadata.resource_version), None)
        return written or ledger_record(document)

    async def _patch_topology(
        self, node: NodeName, version: str, change: Mapping[str, Any], *subresource: str
    ) -> str:
        call = custom_objects.change_topology_call(node, version, change, self._written_by, *subresource)
        body = await self._session.request(call)
        return decoded(_RAW, body, custom_objects.TOPOLOGY).metadata.resource_version

    async def _annotate_pod(
        self, namespace: str, pod: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Set annotations of the pod with this UID, None removes one; others stay."""
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        await self._patch("pods", _pod_path(namespace, pod), f"{namespace}/{pod}", body)

    async def _patch_pod(
        self, pod: PodRecord, subresource: str, metadata: Mapping[str, str], change: Mapping[str, Any]
    ) -> None:
        """Change a subresource of the pod with this metadata; other entries of its lists stay."""
        path = _pod_path(pod.namespace, pod.name, subresource)
        body = {"metadata": metadata, **change}
        name = f"{pod.namespace}/{pod.name}"
        await self._patch(f"pods/{subresource}", path, name, body, patch_type=STRATEGIC_MERGE_PATCH)

    async def _patch(
        self, resource: str, path: str, name: str, body: object, *, patch_type: str = MERGE_PATCH
    ) -> None:
        await self._session.request(
            Call(
                "patch",
                resource,
                path,
                name=name,
                query=self._written_by,
                body=_encode(body),
                accept=METADATA_ONLY,
                patch_type=patch_type,
            )
        )

    async def _get(self, resource: str, path: str, name: str) -> bytes | None:
        try:
            return await self._session.request(Call("get", resource, path, name=name))
        except NotFound:
            return None


class MovingCluster(ApiCluster):
    """A cluster with the call that only `kvplace defragment` makes, with the rights of its user.

    `serve` and the agent have no such right, so `ApiCluster` has no such call.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session, component="defragment")

    async def annotate_vm(self, pod: PodRecord, key: str, value: str | None) -> None:
        """Write an annotation of the VMI of a pod, or of a plain pod; None removes it."""
        if not pod.vmi:
            await self._annotate_pod(pod.namespace, pod.name, pod.uid, {key: value})
            return
        body = {"metadata": {"uid": pod.vmi_uid, "annotations": {key: value}}}
        await self._patch(
            "virtualmachineinstances", _vmi_path(pod.namespace, pod.vmi), f"{pod.namespace}/{pod.vmi}", body
        )


_POD = msgspec.json.Decoder(PodObject)
_BUDGETS = Resource.of(
    "poddisruptionbudgets",
    path_of("apis", "policy", "v1", "poddisruptionbudgets"),
    msgspec.json.Decoder(BudgetObject),
    disruption_budget,
)
_NODE_ROW = msgspec.json.Decoder(NodeRow)
_RAW = msgspec.json.Decoder(RawObject)
_MAPPING = msgspec.json.Decoder(dict[str, Any])
_encode = msgspec.json.encode


def _pod_path(namespace: str, pod: str, *subresource: str) -> str:
    return path_of("api", "v1", "namespaces", namespace, "pods", pod, *subresource)


def _vmi_path(namespace: str, name: str) -> str:
    return path_of("apis", "kubevirt.io", "v1", "namespaces", namespace, "virtualmachineinstances", name)


def _custom(resource: str, record: Callable[[RawObject], R]) -> Resource[R]:
    return Resource.of(resource, path_of("apis", GROUP, VERSION, resource), _RAW, record)
