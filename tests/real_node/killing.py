"""Pods of kvplace on real nodes: kills their programs as a crash would, and reads what they printed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from harness.control_plane.watching import is_ready, wait_for
from harness.kvplace_cluster.installation import NAMESPACE
from harness.real_node.cluster import RealCluster
from harness.real_node.kernel_view import ContainerInKernel
from harness.waiting import wait_until

Json = dict[str, Any]


def pods_of(cluster: RealCluster, namespace: str, component: str) -> list[Json]:
    path = f"/api/v1/namespaces/{namespace}/pods?labelSelector=app.kubernetes.io/component={component}"
    return list(cluster.plane.request("GET", path)["items"])


def restarts(pod: Json) -> int:
    return sum(int(status["restartCount"]) for status in pod["status"].get("containerStatuses", []))


def printed(cluster: RealCluster, pod: Json, container: str) -> list[str]:
    """Return the lines of the newest log of a container."""
    about = pod["metadata"]
    sandbox = cluster.nodes[pod["spec"]["nodeName"]].sandbox
    folder = f"/var/log/pods/{about['namespace']}_{about['name']}_{about['uid']}/{container}"
    logs = sorted(sandbox.path(folder).glob("*.log"), key=lambda log: log.stat().st_mtime)
    return logs[-1].read_text(errors="replace").splitlines() if logs else []


def log_end(cluster: RealCluster, pod: Json, container: str) -> str:
    """Return the end of the newest log of a container, under a line that names it."""
    return "\n".join((f"{pod['metadata']['name']} printed:", *printed(cluster, pod, container)[-40:]))


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes as a crash would; one of them may end with another."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Serve:
    """All replicas of `serve`, ready to be killed at any moment."""

    def __init__(self, cluster: RealCluster) -> None:
        self._cluster = cluster
        self._pods = pods_of(cluster, NAMESPACE, "serve")
        self._pids = [
            pid
            for pod in self._pods
            for pid in ContainerInKernel.of_pod(
                cluster.nodes[pod["spec"]["nodeName"]].sandbox, pod, "serve"
            ).pids()
        ]

    def kill(self) -> Serve:
        """Kill all of them, as a crash would, and return those that have started again.

        The kubelet restarts a container at once only the first time: another pod replaces one that was
        restarted before.
        """
        kill_all(self._pids)
        again = {pod["metadata"]["uid"]: restarts(pod) for pod in self._pods}
        for pod in self._pods:
            if again[pod["metadata"]["uid"]]:
                path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
                self._cluster.plane.request("DELETE", f"{path}?gracePeriodSeconds=0")

        def is_back(pod: Json) -> bool:
            return is_ready(pod) and restarts(pod) > again.get(pod["metadata"]["uid"], -1)

        def all_are_back() -> bool:
            return sum(map(is_back, pods_of(self._cluster, NAMESPACE, "serve"))) == len(self._pods)

        wait_until(all_are_back, lambda: "serve has not started again", pause_s=0.2)
        return Serve(self._cluster)


def kill_container(cluster: RealCluster, namespace: str, pod: Json, container: str) -> None:
    """Kill its processes as a crash would, and wait until the kubelet has it ready again."""
    node = cluster.nodes[pod["spec"]["nodeName"]]
    kill_all(ContainerInKernel.of_pod(node.sandbox, pod, container).pids())
    before = restarts(pod)
    wait_for(
        cluster.plane,
        f"/api/v1/namespaces/{namespace}/pods",
        pod["metadata"]["name"],
        lambda seen: restarts(seen) > before and is_ready(seen),
    )
