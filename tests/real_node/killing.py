"""Kills programs of kvplace on real nodes, as a crash would."""

from __future__ import annotations

import os
import signal
from typing import Any

from harness.control_plane.watching import is_ready, wait_for
from harness.real_node.cluster import RealCluster
from harness.real_node.kernel_view import ContainerInKernel

Json = dict[str, Any]


def pods_of(cluster: RealCluster, namespace: str, component: str) -> list[Json]:
    path = f"/api/v1/namespaces/{namespace}/pods?labelSelector=app.kubernetes.io/component={component}"
    return list(cluster.plane.request("GET", path)["items"])


def restarts(pod: Json) -> int:
    return sum(int(status["restartCount"]) for status in pod["status"].get("containerStatuses", []))


def kill_container(cluster: RealCluster, namespace: str, pod: Json, container: str) -> None:
    """Kill its processes as a crash would, and wait until the kubelet has it ready again."""
    node = cluster.nodes[pod["spec"]["nodeName"]]
    for pid in ContainerInKernel.of_pod(node.sandbox, pod, container).pids():
        os.kill(pid, signal.SIGKILL)
    before = restarts(pod)
    wait_for(
        cluster.plane,
        f"/api/v1/namespaces/{namespace}/pods",
        pod["metadata"]["name"],
        lambda seen: restarts(seen) > before and is_ready(seen),
    )
