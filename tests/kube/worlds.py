"""Both clusters with the same calls for everybody else, so that one contract suite runs against both.

Everybody else is users, virt-controller, the kubelet and the node's agent. Cluster-scoped names carry a tag,
because all tests of a run share the real API server.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias, cast

import msgspec

from harness.control_plane.cluster import STRATEGIC_MERGE_PATCH, ControlPlane
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.events import EventReason, EventRecord, ObjectReference
from kvplace.kube.memory_objects import with_status
from kvplace.kube.object_records import ResourceClaimRecord
from kvplace.kube.objects import BudgetObject, disruption_budget
from kvplace.kube.session import Limits, open_session
from kvplace.kube.watches import (
    EVERYTHING,
    Alive,
    Apply,
    Delete,
    InitApply,
    InitDone,
    Interrupted,
    Kind,
    Selector,
    WatchClient,
    WatchEvent,
)
from tests.kube.faulty_cluster import FaultyCluster

Json = dict[str, Any]
TOPOLOGIES_PATH = "/apis/kvplace.io/v1alpha1/nodetopologies"
RESOURCES_PATH = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
LEDGERS_PATH = "/apis/kvplace.io/v1alpha1/nodeledgers"
REQUEST = '{"version":1,"vcpus":2}'
MACHINE = {
    "packages": [{"id": 0, "cpus": "0-3"}],
    "numaNodes": [
        {"id": 0, "cpus": "0-3", "memory": "16Gi", "hugePages": {"1Gi": 4}, "distances": {"0": 10}}
    ],
    "l3Groups": ["0-3"],
    "cores": ["0,2", "1,3"],
    "reserved": "0",
    "isolated": "",
    "fingerprint": "sha256:0",
}


Cluster: TypeAlias = ApiCluster | FaultyCluster


class World(ABC):
    """One cluster, and what everybody else does in it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._tag = secrets.token_hex(3)

    def named(self, name: str) -> NodeName:
        """Make a cluster-scoped name of this world."""
        return NodeName(f"{name}-{self._tag}")

    @abstractmethod
    async def another_client(self) -> Cluster:
        """Make another client, as another replica does."""

    @abstractmethod
    async def agent(self) -> Cluster:
        """Make a client as an agent does."""

    @abstractmethod
    def create_pod(self, name: str, *, gated: bool = False, asks: bool = True, vmi: str = "") -> PodUid:
        """Create a pod as it is after admission; returns its UID."""

    @abstractmethod
    def create_disruption_budget(self, name: str, selector: Json) -> None: ...

    @abstractmethod
    def label_pod(self, name: str, labels: Mapping[str, str | None]) -> None:
        """Set labels of a pod; None removes one."""

    @abstractmethod
    def delete_pod(self, name: str, *, force: bool = False) -> None: ...

    @abstractmethod
    def set_pod_status(self, name: str, *, phase: str, compute_terminated: bool = False) -> None: ...

    @abstractmethod
    def give_address(self, name: str, address: str, *, phase: str = "Running") -> None:
        """Report the address of a pod in the pod network, as its kubelet does."""

    @abstractmethod
    def create_node(self, name: str) -> None: ...

    @abstractmethod
    def annotate_node(self, name: str, annotations: Mapping[str, str]) -> None:
        """Annotate a node, as a person does."""

    @abstractmethod
    def node_annotations(self, name: str) -> Mapping[str, str]: ...

    @abstractmethod
    def pod_annotations(self, name: str) -> Mapping[str, str]: ...

    @abstractmethod
    def put_topology(self, name: str, spec: Json) -> None: ...

    @abstractmethod
    def allocate_cpus(self, name: str, status: Json) -> None:
        """Create a ResourceClaim for CPUs, and allocate them as kube-scheduler does."""

    @abstractmethod
    def delete_topology(self, name: str) -> None: ...

    @abstractmethod
    def put_resource_topology(self, name: str, document: Json) -> None:
        """Create or replace a NodeResourceTopology, as another component than the agent does."""

    @abstractmethod
    def resource_topology(self, name: str) -> Mapping[str, Any]: ...

    @abstractmethod
    def events(self, reason: EventReason) -> list[EventRecord]: ...

    async def close(self) -> None:
        await self.cluster.close()


class MemoryWorld(World):
    """The in-memory cluster."""

    def __init__(self) -> None:
        self._memory = FaultyCluster()
        super().__init__(self._memory, "default")

    async def another_client(self) -> Cluster:
        return self._memory

    async def agent(self) -> Cluster:
        return self._memory

    def create_pod(self, name: str, *, gated: bool = False, asks: bool = True, vmi: str = "") -> PodUid:
        request = REQUEST if asks else ""
        uid = self._memory.create_pod(name, request=request, vmi=vmi).uid
        if gated:
            self._memory.change_pod(self.namespace, name, gated=True)
        return uid

    def allocate_cpus(self, name: str, status: Json) -> None:
        unallocated = ResourceClaimRecord(self.namespace, name)
        self._memory.put_resource_claim(with_status(unallocated, status))

    def create_disruption_budget(self, name: str, selector: Json) -> None:
        document = {
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"selector": selector},
        }
        self._memory.disruption_budgets.append(disruption_budget(msgspec.convert(document, BudgetObject)))

    def label_pod(self, name: str, labels: Mapping[str, str | None]) -> None:
        self._memory.label_pod(self.namespace, name, labels)

    def delete_pod(self, name: str, *, force: bool = False) -> None:
        self._memory.delete_pod(self.namespace, name, force=force)

    def set_pod_status(self, name: str, *, phase: str, compute_terminated: bool = False) -> None:
        self._memory.change_pod(
            self.namespace,
            name,
            phase=phase,
            compute_terminated=compute_terminated,
        )

    def give_address(self, name: str, address: str, *, phase: str = "Running") -> None:
        runs = () if phase == "Succeeded" else (f"{self.namespace}/{name}",)
        self._memory.addresses[address, False] = runs

    def create_node(self, name: str) -> None:
        self._memory.create_node(name)

    def annotate_node(self, name: str, annotations: Mapping[str, str]) -> None:
        self._memory.create_node(name, cpu_map=annotations["cpu-map"])

    def node_annotations(self, name: str) -> Mapping[str, str]:
        return self._memory.node_annotations(name)

    def pod_annotations(self, name: str) -> Mapping[str, str]:
        return self._memory.pod_annotations(self.namespace, name)

    def put_topology(self, name: str, spec: Json) -> None:
        self._memory.put_topology_document(name, spec)

    def delete_topology(self, name: str) -> None:
        self._memory.delete_topology(name)

    def put_resource_topology(self, name: str, document: Json) -> None:
        self._memory.put_resource_topology(name, document)

    def resource_topology(self, name: str) -> Mapping[str, Any]:
        found = self._memory.resource_topology(name)
        assert found is not None
        return found

    def events(self, reason: EventReason) -> list[EventRecord]:
        return [event for event in self._memory.events if event.reason is reason]


class ApiWorld(World):
    """The real API server."""

    def __init__(self, cluster: Cluster, plane: ControlPlane, namespace: str) -> None:
        super().__init__(cluster, namespace)
        self.plane = plane
        self._clients: list[Cluster] = []

    @classmethod
    async def open(cls, plane: ControlPlane, namespace: str) -> ApiWorld:
        return cls(await api_cluster(plane), plane, namespace)

    async def another_client(self) -> Cluster:
        self._clients.append(await api_cluster(self.plane))
        return self._clients[-1]

    async def agent(self) -> Cluster:
        self._clients.append(await api_cluster(self.plane, component="agent"))
        return self._clients[-1]

    async def close(self) -> None:
        for client in [self.cluster, *self._clients]:
            await client.close()

    def create_pod(self, name: str, *, gated: bool = False, asks: bool = True, vmi: str = "") -> PodUid:
        metadata: Json = {"name": name}
        if asks:
            metadata["labels"] = {"kvplace.io/placed": "true"}
            metadata["annotations"] = {"kvplace.io/request": REQUEST}
        if vmi:
            owner = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": vmi}
            metadata["ownerReferences"] = [{**owner, "uid": "7f3e", "controller": True}]
        spec: Json = {
            "schedulerName": "kvplace",
            "containers": [{"name": "compute", "image": "none"}],
            "terminationGracePeriodSeconds": 30,
        }
        if gated:
            spec["schedulingGates"] = [{"name": "kvplace.io/test"}]
        answer = self.plane.request("POST", self._pods(), {"metadata": metadata, "spec": spec})
        return PodUid(answer["metadata"]["uid"])

    def allocate_cpus(self, name: str, status: Json) -> None:
        path = f"/apis/resource.k8s.io/v1/namespaces/{self.namespace}/resourceclaims"
        requests = [{"name": "cpus", "exactly": {"deviceClassName": "dra.cpu"}}]
        claim = {"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}}
        made = self.plane.request("POST", path, claim)
        self.plane.request("PUT", f"{path}/{name}/status", {**made, "status": status})

    def create_disruption_budget(self, name: str, selector: Json) -> None:
        path = f"/apis/policy/v1/namespaces/{self.namespace}/poddisruptionbudgets"
        budget = {"metadata": {"name": name}, "spec": {"maxUnavailable": 0, "selector": selector}}
        self.plane.request("POST", path, budget)

    def label_pod(self, name: str, labels: Mapping[str, str | None]) -> None:
        patch = {"metadata": {"labels": dict(labels)}}
        self.plane.request("PATCH", self._pods(name), patch, content_type="application/merge-patch+json")

    def delete_pod(self, name: str, *, force: bool = False) -> None:
        self.plane.request("DELETE", self._pods(name) + ("?gracePeriodSeconds=0" if force else ""))

    def set_pod_status(self, name: str, *, phase: str, compute_terminated: bool = False) -> None:
        status: Json = {"phase": phase}
        if compute_terminated:
            state = {"terminated": {"exitCode": 0}}
            compute = {"name": "compute", "image": "none", "imageID": "", "ready": False, "restartCount": 0}
            status["containerStatuses"] = [{**compute, "state": state}]
        path = self._pods(name) + "/status"
        self.plane.request("PATCH", path, {"status": status}, content_type=STRATEGIC_MERGE_PATCH)

    def give_address(self, name: str, address: str, *, phase: str = "Running") -> None:
        status = {"phase": phase, "podIP": address, "podIPs": [{"ip": address}]}
        path = self._pods(name) + "/status"
        self.plane.request("PATCH", path, {"status": status}, content_type=STRATEGIC_MERGE_PATCH)

    def create_node(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name}
        self.plane.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})

    def annotate_node(self, name: str, annotations: Mapping[str, str]) -> None:
        self.plane.kubectl(
            "annotate", "--overwrite", "node", name, *(f"{key}={text}" for key, text in annotations.items())
        )

    def node_annotations(self, name: str) -> Mapping[str, str]:
        node = self.plane.request("GET", f"/api/v1/nodes/{name}")
        return cast(dict[str, str], node["metadata"].get("annotations", {}))

    def pod_annotations(self, name: str) -> Mapping[str, str]:
        pod = self.plane.request("GET", self._pods(name))
        return cast(dict[str, str], pod["metadata"].get("annotations", {}))

    def put_topology(self, name: str, spec: Json) -> None:
        document = {
            "apiVersion": "kvplace.io/v1alpha1",
            "kind": "NodeTopology",
            "metadata": {"name": name},
            "spec": spec,
        }
        path = f"{TOPOLOGIES_PATH}/{name}?fieldManager=a-person&force=true"
        self.plane.request("PATCH", path, document, content_type="application/apply-patch+yaml")

    def delete_topology(self, name: str) -> None:
        self.plane.request("DELETE", f"{TOPOLOGIES_PATH}/{name}")

    def put_resource_topology(self, name: str, document: Json) -> None:
        path = f"{RESOURCES_PATH}/{name}?fieldManager=nfd-topology-updater&force=true"
        named = {**document, "metadata": {**document["metadata"], "name": name}}
        self.plane.request("PATCH", path, named, content_type="application/apply-patch+yaml")

    def resource_topology(self, name: str) -> Mapping[str, Any]:
        return self.plane.request("GET", f"{RESOURCES_PATH}/{name}")

    def events(self, reason: EventReason) -> list[EventRecord]:
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        return [
            EventRecord(
                ObjectReference(
                    item["regarding"]["kind"],
                    item["regarding"].get("namespace", ""),
                    item["regarding"]["name"],
                    item["regarding"]["uid"],
                ),
                reason,
                item["note"],
            )
            for item in self.plane.request("GET", path)["items"]
            if (item["reason"], item["type"], item["action"]) == (reason.value, reason.type, reason.action)
        ]

    def _pods(self, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods" + (f"/{name}" if name else "")


async def api_cluster(plane: ControlPlane, limits: Limits | None = None, **options: Any) -> ApiCluster:
    """Make a client of the control plane as its administrator."""
    return ApiCluster(
        await open_session(CredentialOptions(kubeconfig=str(plane.kubeconfig)), limits), **options
    )


Reported: TypeAlias = InitApply[Any] | Apply[Any] | Delete[Any]


class Watcher:
    """The events of one watch that state what there is, in order."""

    def __init__(self) -> None:
        self.events: list[WatchEvent[Any]] = []
        self.synced = asyncio.Event()
        self._reported = asyncio.Event()

    def add(self, event: WatchEvent[Any]) -> None:
        if isinstance(event, Alive | Interrupted):
            return
        self.events.append(event)
        if isinstance(event, InitDone):
            self.synced.set()
        self._reported.set()
        self._reported = asyncio.Event()

    async def until(self, condition: Callable[[Reported], Any]) -> Reported:
        """Wait for the first event that is Apply or Delete and satisfies the condition; returns it."""
        while True:
            changed = self._reported
            for event in self.events:
                if isinstance(event, InitApply | Apply | Delete) and condition(event):
                    return event
            await changed.wait()

    def records(self, key: str) -> list[Reported]:
        """Every event about the records of that name, in order."""
        return [
            event
            for event in self.events
            if isinstance(event, InitApply | Apply | Delete) and _name(event.record) == key
        ]


def _name(record: Any) -> str:
    return str(
        getattr(record, "node" if hasattr(record, "ledger") or hasattr(record, "topology") else "name")
    )


@asynccontextmanager
async def watching(
    cluster: WatchClient, kind: Kind[Any, Any], selector: Selector = EVERYTHING
) -> AsyncIterator[Watcher]:
    """Watch objects of a kind for as long as the block runs, which starts when the first list is complete."""
    watcher = Watcher()

    async def listen() -> None:
        events = cluster.watch(kind, selector)
        async with aclosing(cast(Any, events)):
            async for event in events:
                watcher.add(event)

    task = asyncio.create_task(listen())
    try:
        await watcher.synced.wait()
        yield watcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
