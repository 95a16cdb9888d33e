"""Kubelet, virt-handler and agent played for the VMs of a namespace: a bound VM runs, and is then pinned.

For tests about many VMs and not about nodes: each VM costs three writes and no process. The scheduler,
virt-controller, admission and kvplace are real; here a bound pod is ready at once, a VMI that virt-controller
has handed over runs at once, and the agent finds every thread where it belongs. A deleted VM ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime
from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kube_stream import STRATEGIC_MERGE_PATCH, KubeClient
from harness.control_plane.kubevirt_parts import NAMESPACE as KUBEVIRT
from harness.loop_thread import loop_thread
from kvplace.core.well_known_names import PINNED

Json = dict[str, Any]

_MERGE_PATCH = "application/merge-patch+json"


class PlayedVms:
    """Follows the pods and VMIs of a namespace while it is used with `async with`."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._client = KubeClient(plane.url, plane.ca_file, plane.admin.token)
        # KubeVirt's admission drops writes of others into the status of a VMI.
        token = plane.service_account_token(KUBEVIRT, "kubevirt-controller")
        self._virt_handler = KubeClient(plane.url, plane.ca_file, token)
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._vmis = f"/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances"
        self._done: set[tuple[str, str]] = set()
        """The writes done to an object, by its UID."""
        self._pod_of: dict[str, str] = {}
        """The newest pod of each VMI."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> None:
        await self._client.__aenter__()
        await self._virt_handler.__aenter__()
        self._spawn(self._follow_pods())
        self._spawn(self._follow_vmis())

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._virt_handler.__aexit__(None, None, None)
        await self._client.__aexit__(None, None, None)

    async def _follow_pods(self) -> None:
        async with contextlib.aclosing(self._client.list_and_watch(self._pods, "spec.nodeName!=")) as changes:
            async for change, pod in changes:
                if change == "seen":
                    self._see_pod(pod)

    def _see_pod(self, pod: Json) -> None:
        metadata = pod["metadata"]
        path = f"{self._pods}/{metadata['name']}"
        self._pod_of[metadata["annotations"].get("kubevirt.io/domain", "")] = path
        if "deletionTimestamp" in metadata:
            self._once("end", metadata["uid"], self._ask("DELETE", path, {"gracePeriodSeconds": 0}))
        elif pod["status"].get("phase") != "Running":
            body = {"status": _ready(pod)}
            self._once(
                "run", metadata["uid"], self._ask("PATCH", f"{path}/status", body, STRATEGIC_MERGE_PATCH)
            )

    async def _follow_vmis(self) -> None:
        async with contextlib.aclosing(self._client.list_and_watch(self._vmis, "")) as changes:
            async for change, vmi in changes:
                if change == "seen":
                    self._see_vmi(vmi)

    def _see_vmi(self, vmi: Json) -> None:
        metadata, phase = vmi["metadata"], vmi.get("status", {}).get("phase")
        if "deletionTimestamp" in metadata and phase in ("Scheduled", "Running"):
            self._once("stop", metadata["uid"], self._set_phase(vmi, "Succeeded"))
        elif phase == "Scheduled":
            self._once("start", metadata["uid"], self._start(vmi))

    async def _start(self, vmi: Json) -> None:
        await self._set_phase(vmi, "Running")
        condition = {
            "type": PINNED,
            "status": "True",
            "reason": "Pinned",
            "message": "every thread is where revision 1 states",
            "lastTransitionTime": _now(),
        }
        path = f"{self._pod_of[vmi['metadata']['name']]}/status"
        await self._ask("PATCH", path, {"status": {"conditions": [condition]}}, STRATEGIC_MERGE_PATCH)

    async def _set_phase(self, vmi: Json, phase: str) -> None:
        before = vmi["status"].get("phaseTransitionTimestamps", [])
        times = [*before, {"phase": phase, "phaseTransitionTimestamp": _now()}]
        body = {"status": {"phase": phase, "phaseTransitionTimestamps": times}}
        path = f"{self._vmis}/{vmi['metadata']['name']}"
        await self._virt_handler.persist("PATCH", path, body, _MERGE_PATCH)

    async def _ask(self, method: str, path: str, body: Json, content: str = "application/json") -> None:
        await self._client.persist(method, path, body, content)

    def _once(self, what: str, uid: str, work: Coroutine[Any, Any, None]) -> None:
        if (what, uid) in self._done:
            work.close()
            return
        self._done.add((what, uid))
        self._spawn(work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextlib.contextmanager
def played_vms(plane: ControlPlane, namespace: str) -> Iterator[None]:
    """Play in a thread until the block ends."""
    with loop_thread("played-vms") as thread:
        played = PlayedVms(plane, namespace)
        thread.do(played.__aenter__())
        try:
            yield
        finally:
            thread.do(played.__aexit__())


def _ready(pod: Json) -> Json:
    """Write the status of a pod with all containers running."""
    now = _now()

    def running(kind: str) -> list[Json]:
        return [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": container["image"],
                "ready": True,
                "started": True,
                "restartCount": 0,
                "resources": container.get("resources") or {},
                "state": {"running": {"startedAt": now}},
            }
            for container in pod["spec"].get(kind, ())
        ]

    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": now}
        for kind in ("Initialized", "ContainersReady", "Ready")
    ]
    return {
        "phase": "Running",
        "startTime": now,
        "podIP": "10.128.0.1",
        "podIPs": [{"ip": "10.128.0.1"}],
        "conditions": conditions,
        "containerStatuses": running("containers"),
        "initContainerStatuses": running("initContainers"),
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
