"""The API server's reports about one scene's pods and ledgers, followed while everything else fails.

Promise 1 is checked at every change: the CPUs of the pods that are bound to a node never overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kube_stream import KubeClient
from harness.control_plane.kubelet_admission import has_ended
from harness.loop_thread import loop_thread
from harness.waiting import PATIENCE_S
from kvplace.core.cpuset import cpus_of
from kvplace.core.placement import PodPlacement
from kvplace.core.well_known_names import PLACEMENT

Json = dict[str, Any]
LEDGERS = "/apis/kvplace.io/v1alpha1/nodeledgers"


def owned_cpus(pod: Json) -> set[tuple[str, int]]:
    """The (node, CPU) pairs that a pod owns by its placement: none before it is bound or after its end."""
    node = pod["spec"].get("nodeName")
    text = pod["metadata"].get("annotations", {}).get(PLACEMENT)
    if not node or text is None or has_ended(pod):
        return set()
    bound = PodPlacement.from_json(text)
    assert (bound.pod_uid, bound.node) == (pod["metadata"]["uid"], node), text
    return {(node, cpu) for cpu in cpus_of(bound.placement.owned)}


def waits_with_a_reason(pod: Json) -> bool:
    """Whether kube-scheduler has reported in the pod's status why it has no node."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(
        one["type"] == "PodScheduled" and one["status"] == "False" and one.get("message")
        for one in conditions
    )


@dataclass
class Observer:
    """Pods of one namespace by UID, and ledgers by node, as they are now."""

    pods: dict[str, Json] = field(default_factory=dict)
    ledgers: dict[str, Json] = field(default_factory=dict)
    events: dict[str, Json] = field(default_factory=dict)
    """Events about things in the namespace, by UID."""
    bound_at: dict[str, float] = field(default_factory=dict)
    """Time of the monotonic clock by UID."""
    broken: list[str] = field(default_factory=list)
    """Promises seen broken."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _owners: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def all(self) -> list[Json]:
        """Every pod there is."""
        return list(self.pods.values())

    @property
    def bound(self) -> list[Json]:
        """The pods that have a node and have not ended there."""
        return [pod for pod in self.all if pod["spec"].get("nodeName") and not has_ended(pod)]

    def wait_until(self, holds: Callable[[], bool], what: str) -> float:
        """Wait until something is true of what was seen, and return when that was noticed."""
        with self._changed:
            if not self._changed.wait_for(holds, PATIENCE_S):
                raise AssertionError(f"{what} was not so after {PATIENCE_S:.0f} s: {self._summary()}")
            return time.monotonic()

    def wait_until_bound(self, count: int) -> float:
        """Wait until so many pods are bound; return when the last one of them was."""
        self.wait_until(lambda: len(self.bound) >= count, f"that {count} pods are bound")
        return sorted(self.bound_at[pod["metadata"]["uid"]] for pod in self.bound)[count - 1]

    def all_are_settled(self) -> bool:
        """Whether each pod is bound or has the reason why not."""
        return all(pod["spec"].get("nodeName") or waits_with_a_reason(pod) for pod in self.all)

    def kubelets_have_answered(self) -> bool:
        """Whether each bound pod was started or rejected on its node."""
        bound = [pod for pod in self.all if pod["spec"].get("nodeName")]
        return all(pod.get("status", {}).get("phase") in ("Running", "Failed") for pod in bound)

    def ledgers_agree(self, nodes: list[str]) -> bool:
        """Whether the ledgers hold just the CPUs of the pods that are bound."""
        for node in nodes:
            spec = self.ledgers.get(node, {}).get("spec", {"owners": {}, "claims": {}})
            owners = {str(cpu): uid for (on, cpu), uid in self._owners.items() if on == node}
            uids = {pod["metadata"]["uid"] for pod in self.bound if pod["spec"]["nodeName"] == node}
            if spec["owners"] != owners or set(spec["claims"]) != uids:
                return False
        return True

    def ledgers_are_empty(self, nodes: list[str]) -> bool:
        """Whether no core of these nodes has an owner and nothing is claimed."""
        specs = [self.ledgers[node]["spec"] for node in nodes if node in self.ledgers]
        return not any(spec["owners"] or spec["claims"] for spec in specs)

    async def follow_pods(self, client: KubeClient, namespace: str) -> None:
        """Follow the pods until cancelled."""
        stream = client.list_and_watch(f"/api/v1/namespaces/{namespace}/pods", "")
        async with contextlib.aclosing(stream) as changes:
            async for change, pod in changes:
                with self._changed:
                    self._see_pod(change == "deleted", pod)
                    self._changed.notify_all()

    async def follow_events(self, client: KubeClient, namespace: str) -> None:
        """Follow the events until cancelled."""
        stream = client.list_and_watch(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", "")
        async with contextlib.aclosing(stream) as changes:
            async for _, event in changes:
                with self._changed:
                    self.events[event["metadata"]["uid"]] = event
                    self._changed.notify_all()

    async def follow_ledgers(self, client: KubeClient) -> None:
        """Follow the ledgers until cancelled."""
        async with contextlib.aclosing(client.list_and_watch(LEDGERS, "")) as changes:
            async for change, ledger in changes:
                with self._changed:
                    name = ledger["metadata"]["name"]
                    if change == "deleted":
                        self.ledgers.pop(name, None)
                    else:
                        self.ledgers[name] = ledger
                    self._changed.notify_all()

    def _see_pod(self, deleted: bool, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        if deleted or has_ended(pod):
            self._owners = {place: owner for place, owner in self._owners.items() if owner != uid}
        if deleted:
            self.pods.pop(uid, None)
            return
        self.pods[uid] = pod
        for place in owned_cpus(pod):
            owner = self._owners.setdefault(place, uid)
            if owner != uid:
                self.broken.append(f"CPU {place[1]} of {place[0]} is in the placements of {owner} and {uid}")
        if pod["spec"].get("nodeName"):
            self.bound_at.setdefault(uid, time.monotonic())

    def _summary(self) -> str:
        waiting = [
            f"{pod['metadata']['name']}: {pod.get('status', {}).get('conditions')}"
            for pod in self.pods.values()
            if not pod["spec"].get("nodeName")
        ]
        claims = {node: len(ledger["spec"]["claims"]) for node, ledger in self.ledgers.items()}
        return f"{len(self.bound)} of {len(self.pods)} bound; claims {claims}; waiting: {waiting[:3]}"


@contextlib.contextmanager
def observing(plane: ControlPlane, namespace: str) -> Iterator[Observer]:
    """Follow a namespace while the block runs, with a connection that no fault touches."""
    observer = Observer()
    with loop_thread("observer") as thread:
        running = thread.do(_begin(plane, namespace, observer))
        try:
            yield observer
        finally:
            thread.do(_end(*running))


async def _begin(
    plane: ControlPlane, namespace: str, observer: Observer
) -> tuple[KubeClient, list[asyncio.Task[None]]]:
    client = await KubeClient(plane.url, plane.ca_file, plane.admin.token).__aenter__()
    loop = asyncio.get_running_loop()
    return client, [
        loop.create_task(observer.follow_pods(client, namespace)),
        loop.create_task(observer.follow_events(client, namespace)),
        loop.create_task(observer.follow_ledgers(client)),
    ]


async def _end(client: KubeClient, tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    await client.__aexit__(None, None, None)
    for one in ended:
        if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError):
            raise one
