"""Nodes without machines: Node objects, and a kubelet played for the pods bound to them.

A pod bound here gets its downward API files and environment, its containers are started by the runner that
the test chose (or are hollow and run at once), its probes are carried out, and its status is written as a
kubelet would write it. One watch serves all nodes of a group, so a thousand nodes cost no more than the pods
on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import shutil
import tempfile
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.container_life import Timing
from harness.control_plane.containers import ContainerRunner
from harness.control_plane.hollow_pod import HollowPod, Kubelet
from harness.control_plane.kube_stream import STRATEGIC_MERGE_PATCH, ApiRefused, KubeClient
from harness.control_plane.kubelet_admission import rejection
from harness.control_plane.pod_status import Addresses
from harness.loop_thread import LoopThread, loop_thread

Json = dict[str, Any]
Result = TypeVar("Result")

_POD_NETWORK = ipaddress.ip_network("10.128.0.0/9")
_NODE_NETWORK = ipaddress.ip_network("172.16.0.0/12")


@dataclass(frozen=True, slots=True)
class NodeShape:
    """The resources of one hollow node."""

    name: str
    cpus: int = 16
    memory: str = "64Gi"
    hugepages: Mapping[str, str] = field(default_factory=dict)
    """Page size to amount, e.g. {"1Gi": "32Gi"}."""
    reserved_cpus: int = 0
    pods: int = 250
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, str] = field(default_factory=dict)
    """Further extended resources."""

    def manifest(self, address: str) -> Json:
        """Return the Node object, with everything that KubeVirt searches for on a node that can run VMs."""
        capacity = {
            "cpu": str(self.cpus),
            "memory": self.memory,
            "pods": str(self.pods),
            "ephemeral-storage": "500Gi",
            **{f"hugepages-{size}": amount for size, amount in self.hugepages.items()},
            **{f"devices.kubevirt.io/{device}": "1k" for device in ("kvm", "tun", "vhost-net")},
            **self.resources,
        }
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.name,
                "labels": {
                    "kubernetes.io/hostname": self.name,
                    "kubernetes.io/os": "linux",
                    "kubernetes.io/arch": "amd64",
                    "kubevirt.io/schedulable": "true",
                    "kubevirt.io/cpumanager": "true",
                    "machine-type.node.kubevirt.io/q35": "true",
                    **self.labels,
                },
                "annotations": dict(self.annotations),
            },
            "status": {
                "capacity": capacity,
                "allocatable": {**capacity, "cpu": str(self.cpus - self.reserved_cpus)},
                "conditions": [
                    {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "hollow"}
                ],
                "addresses": [
                    {"type": "InternalIP", "address": address},
                    {"type": "Hostname", "address": self.name},
                ],
            },
        }


class HollowNodes:
    """A group of hollow nodes; use it with `async with`, which also removes them and their pods at the
    end.
    """

    def __init__(
        self,
        plane: ControlPlane,
        shapes: Iterable[NodeShape] = (),
        *,
        runner: ContainerRunner | None = None,
        timing: Timing | None = None,
        folder: Path | None = None,
        admits: bool = False,
    ) -> None:
        """Prepare the group.

        Args:
            plane: the cluster to join.
            shapes: the nodes to begin with.
            runner: the starter of containers; None makes every container hollow, so pods are Ready at once.
            timing: how fast probes and restarts follow each other.
            folder: keeps the containers' logs; otherwise they go with the group.
            admits: reject pods with CPU requests that do not fit, as a kubelet does.
        """
        self.client = KubeClient(plane.url, plane.ca_file, plane.admin.token)
        self.folder = folder or Path(tempfile.mkdtemp(prefix="hollow-", dir=plane.folder))
        self.nodes: dict[str, str] = {}
        self.pods: dict[str, HollowPod] = {}
        self._cpus: dict[str, int] = {}
        self._admits = admits
        self._keeps_folder = folder is not None
        self._shapes = tuple(shapes)
        self._kubelet = Kubelet(self.client, self.folder, runner, timing or Timing(), self._may_end)
        self._holds: dict[tuple[str, str], asyncio.Event] = {}
        self._node_addresses = _NODE_NETWORK.hosts()
        self._pod_addresses = _POD_NETWORK.hosts()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Containers run as other users and must reach their mounts.
        self.folder.chmod(0o755)
        await self.client.__aenter__()
        self._spawn(self._follow_pods())
        try:
            await self.add(*self._shapes)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.remove(*self.nodes)
        finally:
            await self._stop()
        if self._failures:
            raise BaseExceptionGroup("hollow pods failed", self._failures)

    async def add(self, *shapes: NodeShape) -> None:
        """Create nodes; they take pods as soon as this returns."""
        at_once = asyncio.Semaphore(16)

        async def create(shape: NodeShape) -> None:
            address = str(next(self._node_addresses))
            # Known first: a pod may be bound between the answer and the next line.
            self.nodes[shape.name] = address
            self._cpus[shape.name] = shape.cpus - shape.reserved_cpus
            async with at_once:
                node = await self.client.request("POST", "/api/v1/nodes", shape.manifest(address))
                if node["spec"].get("taints"):
                    await self.client.request(
                        "PATCH",
                        f"/api/v1/nodes/{shape.name}",
                        {"spec": {"taints": None}},
                        "application/merge-patch+json",
                    )

        async with asyncio.TaskGroup() as creating:
            for shape in shapes:
                creating.create_task(create(shape))

    async def remove(self, *names: str) -> None:
        """Take nodes away at once with the pods on them, as when machines burn down."""
        doomed = [pod for pod in self.pods.values() if pod.pod["spec"]["nodeName"] in names]
        at_once = asyncio.Semaphore(16)

        async def delete(path: str) -> None:
            async with at_once:
                with contextlib.suppress(ApiRefused):
                    await self.client.request("DELETE", path, {"gracePeriodSeconds": 0})

        async with asyncio.TaskGroup() as deleting:
            for path in [*(pod.path for pod in doomed), *(f"/api/v1/nodes/{name}" for name in names)]:
                deleting.create_task(delete(path))
        for pod in doomed:
            pod.vanish()
        for name in names:
            self.nodes.pop(name, None)

    def find(self, namespace: str, name: str) -> HollowPod:
        """Return the pod of that name which runs here; raises KeyError."""
        for pod in self.pods.values():
            metadata = pod.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, name):
                return pod
        raise KeyError(f"no pod {namespace}/{name} on these nodes")

    async def end_container(self, namespace: str, name: str, container: str, exit_code: int = 0) -> None:
        """Let a hollow container end as if its program had exited, e.g. `compute` when QEMU is gone."""
        self.find(namespace, name).containers.named(container).end(exit_code)

    async def hold_termination(self, namespace: str, name: str) -> None:
        """Keep a pod's containers running after its deletion until `allow_termination`."""
        self._holds[namespace, name] = asyncio.Event()

    async def allow_termination(self, namespace: str, name: str) -> None:
        """Let a held pod end."""
        self._holds.pop((namespace, name)).set()

    def _may_end(self, pod: Json) -> asyncio.Event:
        free = asyncio.Event()
        free.set()
        return self._holds.get((pod["metadata"]["namespace"], pod["metadata"]["name"]), free)

    async def _follow_pods(self) -> None:
        changes = self.client.list_and_watch("/api/v1/pods", "spec.nodeName!=")
        async with contextlib.aclosing(changes):
            async for change, pod in changes:
                self._take_notice(change, pod)

    def _take_notice(self, change: str, pod: Json) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
        if change == "deleted":
            if uid in self.pods:
                self.pods[uid].vanish()
        elif uid in self.pods:
            self.pods[uid].see(pod)
        elif node in self.nodes:
            host = self.nodes[node]
            own = host if pod["spec"].get("hostNetwork") else str(next(self._pod_addresses))
            others = [known.pod for known in self.pods.values() if known.pod["spec"]["nodeName"] == node]
            rejected = rejection(pod, others, self._cpus[node]) if self._admits else None
            if rejected is not None:
                pod = {**pod, "status": {**pod["status"], **rejected}}
                self._spawn(self._reject(pod, rejected))
            self.pods[uid] = HollowPod(self._kubelet, pod, Addresses(host, own))
            self._spawn(self._play(self.pods[uid]))

    async def _reject(self, pod: Json, status: Json) -> None:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}/status"
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
        await self.client.persist("PATCH", path, body, STRATEGIC_MERGE_PATCH)

    async def _play(self, pod: HollowPod) -> None:
        try:
            await pod.run()
        finally:
            self.pods.pop(pod.uid, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failures.append(failure)

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.__aexit__(None, None, None)
        if not self._keeps_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


class NodesInBackground:
    """Hollow nodes on an event loop in a thread of their own, for tests that are not asyncio."""

    def __init__(self, nodes: HollowNodes, thread: LoopThread) -> None:
        self.nodes = nodes
        self._thread = thread

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Carry out one of the group's own coroutines, e.g. `do(nodes.add(shape))`, and return its
        result.
        """
        return self._thread.do(work)


@contextlib.contextmanager
def nodes_in_background(
    plane: ControlPlane,
    shapes: Iterable[NodeShape],
    *,
    runner: ContainerRunner | None = None,
    timing: Timing | None = None,
    folder: Path | None = None,
    admits: bool = False,
) -> Iterator[NodesInBackground]:
    """Run hollow nodes beside the test until the block ends; arguments as of `HollowNodes`."""
    nodes = HollowNodes(plane, shapes, runner=runner, timing=timing, folder=folder, admits=admits)
    with loop_thread("hollow-nodes") as thread:
        background = NodesInBackground(nodes, thread)
        background.do(nodes.__aenter__())
        try:
            yield background
        finally:
            background.do(nodes.__aexit__(None, None, None))
