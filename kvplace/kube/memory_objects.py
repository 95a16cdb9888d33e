"""The stored objects of the in-memory cluster: logs of changes, and the changes by others.

Like etcd behind an API server: every change gets the next resource version and an entry in a log. A watch
reads the log at its own pace. Compaction forgets the past, and a watch that still needs it lists again.
`MemoryObjects` has the calls that play users, kubelet and agent; `MemoryCluster` adds the calls of a client.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from kvplace.core.cluster.victims import DisruptionBudget
from kvplace.core.errors import Conflict, Misconfigured, Refused
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import CPU_MAP, PLACEMENT, REQUEST
from kvplace.kube.events import EventRecord
from kvplace.kube.migrations import MIGRATIONS, MigrationRecord, PlannedMigration
from kvplace.kube.object_records import (
    NO_SHAPE,
    AgentPod,
    Condition,
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
    Apply,
    Delete,
    Init,
    InitApply,
    InitDone,
    Kind,
    Selector,
    WatchEvent,
)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _LoggedObject(Generic[R]):
    record: R
    labels: Mapping[str, str] = field(default_factory=dict)


class ObjectLog(Generic[R]):
    """Current records by key, and how they became so."""

    def __init__(self, kind: Kind[Any, R], *, log_limit: int = 100_000) -> None:
        """A log that grows beyond `log_limit` entries loses its older half."""
        self._kind = kind
        self._objects: dict[Hashable, _LoggedObject[R]] = {}
        self._log_limit = log_limit
        self._log: list[tuple[_LoggedObject[R] | None, _LoggedObject[R] | None]] = []
        """Each object before and after a change."""
        self._forgotten = 0
        self._changed = asyncio.Event()
        self._paused = False
        self._closed = False

    @property
    def records(self) -> Mapping[Hashable, R]:
        """All records by key."""
        return {key: known.record for key, known in self._objects.items()}

    def get(self, key: Hashable) -> R | None:
        """Return the record of a key."""
        known = self._objects.get(key)
        return known.record if known is not None else None

    def selected(self, selector: Selector) -> tuple[R, ...]:
        """Return the records that a selector selects."""
        return tuple(
            known.record
            for known in self._objects.values()
            if selector.selects(self._kind, known.record, known.labels)
        )

    def labels(self, key: Hashable) -> Mapping[str, str]:
        """Return the labels of an object that is there."""
        return self._objects[key].labels

    def put(self, key: Hashable, record: R, labels: Mapping[str, str] | None = None) -> None:
        """Add or replace a record; without `labels` it keeps its labels."""
        before = self._objects.get(key)
        if labels is None:
            labels = before.labels if before is not None else {}
        self._objects[key] = after = _LoggedObject(record, labels)
        self._append(before, after)

    def remove(self, key: Hashable) -> None:
        """Remove a record, if it is there."""
        before = self._objects.pop(key, None)
        if before is not None:
            self._append(before, None)

    def compact(self) -> None:
        """Forget the log: watches that have not read all of it must list again."""
        self._forgotten += len(self._log)
        self._log.clear()
        self._wake()

    def relist_all(self) -> None:
        """Make every watch list again, as when its connection and the past are lost."""
        self.compact()
        self._forgotten += 1
        self._wake()

    def pause(self) -> None:
        """Report nothing more to watches until `resume`: their view grows stale."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self._wake()

    async def watch(self, selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        """Follow the selected objects from now on; ends only when the log is closed."""

        def selected(known: _LoggedObject[R] | None) -> R | None:
            if known is None or not selector.selects(self._kind, known.record, known.labels):
                return None
            return known.record

        position = -1
        while not self._closed:
            if self._paused:
                await self._changed.wait()
            elif position < self._forgotten:
                snapshot = [selected(known) for known in self._objects.values()]
                position = self._end
                yield Init()
                for record in snapshot:
                    if record is not None:
                        yield InitApply(record)
                yield InitDone()
            elif position < self._end:
                before, after = map(selected, self._log[position - self._forgotten])
                position += 1
                if after is not None:
                    yield Apply(after)
                elif before is not None:
                    yield Delete(before)
            else:
                await self._changed.wait()

    @property
    def _end(self) -> int:
        return self._forgotten + len(self._log)

    def _append(self, before: _LoggedObject[R] | None, after: _LoggedObject[R] | None) -> None:
        self._log.append((before, after))
        if len(self._log) > self._log_limit:
            keep = self._log_limit // 2
            self._forgotten += len(self._log) - keep
            del self._log[: len(self._log) - keep]
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class MemoryObjects:
    """The objects of a cluster, changed as users, kubelet, agents and KubeVirt change them."""

    def __init__(self) -> None:
        self.events: list[EventRecord] = []
        self.topology_statuses: dict[NodeName, TopologyStatus] = {}
        """The status of each NodeTopology as its agent has written it last."""
        self._versions = itertools.count(1)
        self._serials = itertools.count(1)
        self.migrations = ObjectLog(MIGRATIONS)
        self.migrates_to: dict[str, PlannedMigration] = {}
        """The created migrations by name."""
        self.refuses_migrations = ""
        """Why KubeVirt or the API server refuses a migration; empty if it does not."""
        self.time: Callable[[], str] = lambda: "2026-01-02T00:00:00Z"
        """The date of a migration that is created now."""
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
        self.addresses: dict[tuple[str, bool], tuple[str, ...]] = {}
        """Pods as `namespace/name` by their address, and by whether they use the network of their host."""
        self.disruption_budgets: list[DisruptionBudget] = []
        """The PodDisruptionBudgets as their controller has counted them last."""

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

    def edit_pod(self, namespace: str, name: str, asking: Mapping[str, str]) -> None:
        """Edit the asking annotations of a plain pod."""
        self._put_pod(replace(self._pod(namespace, name), asking=dict(asking)))

    def put_migration(self, namespace: str, name: str, vmi: str, phase: str, *, created: str = "") -> None:
        """Let a migration be in a phase, as virt-controller and other creators of migrations do."""
        known = self.migrations.get((namespace, name))
        record = known or MigrationRecord(namespace, name, vmi, created=created or self.time())
        self.migrations.put((namespace, name), replace(record, phase=phase))

    # For subclasses.

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

    def _next_version(self) -> str:
        return str(next(self._versions))

    def _next_uid(self, what: str) -> str:
        return f"{what}-{next(self._serials):08d}"


def with_status(claim: ResourceClaimRecord, status: Mapping[str, Any]) -> ResourceClaimRecord:
    """Return a resource claim after a write of its status, as the API server carries it out.

    Raises Misconfigured for another allocation in the place of the one that is there.
    """
    allocation = status["allocation"]
    if None not in (allocation, claim.allocated) and allocation != claim.status["allocation"]:
        raise Misconfigured(f"ResourceClaim {claim.namespace}/{claim.name}: status.allocation is immutable")
    results = allocation["devices"]["results"] if allocation is not None else ()
    return replace(
        claim,
        allocated=tuple((one["driver"], one["pool"], one["device"]) for one in results) or None,
        status={key: value for key, value in status.items() if value is not None},
    )
