"""Plain pods that opted in on nodes with two sockets of eight CPUs, and what their agents report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane
from harness.control_plane.hollow_node import NodesInBackground, nodes_in_background
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape, two_socket_machine
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACEMENT

Json = dict[str, Any]
LEDGERS = "/apis/kvplace.io/v1alpha1/nodeledgers"
TOPOLOGY = "/apis/kvplace.io/v1alpha1/nodetopologies/{}/status"
PRIORITIES = {"low": 10, "middle": 20, "high": 1000}
MACHINE = two_socket_machine(cores_per_socket=4, reserved_cores=0)
"""Two sockets of eight CPUs."""


def create_priority_classes(plane: ControlPlane) -> None:
    for name, value in PRIORITIES.items():
        plane.request(
            "POST",
            "/apis/scheduling.k8s.io/v1/priorityclasses",
            {"metadata": {"name": name}, "value": value},
        )


@contextmanager
def nodes(
    plane: ControlPlane, installed: Installation, machines: dict[str, Topology]
) -> Iterator[NodesInBackground]:
    shapes = [node_shape(name, machine) for name, machine in machines.items()]
    with nodes_in_background(plane, shapes) as background, described_nodes(installed, machines):
        yield background


def create(
    plane: ControlPlane,
    pods: str,
    name: str,
    cpus: int,
    priority: str,
    *,
    annotations: dict[str, str] | None = None,
    **more: Any,
) -> None:
    spec = {
        "priorityClassName": priority,
        "containers": [
            {"name": "work", "image": "work.test/work", "resources": {"limits": {"cpu": str(cpus)}}}
        ],
        **more,
    }
    asking = {"cpu-set": "one-socket", **(annotations or {})}
    metadata = {"name": name, "annotations": asking, "labels": {"name": name}}
    plane.request("POST", pods, {"metadata": metadata, "spec": spec})


def bound(plane: ControlPlane, pods: str, name: str) -> Placement:
    pod = wait_for(plane, pods, name, lambda pod: bool(pod["spec"].get("nodeName")))
    return PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT]).placement


def running(plane: ControlPlane, pods: str, name: str, cpus: int, priority: str) -> Placement:
    create(plane, pods, name, cpus, priority)
    return bound(plane, pods, name)


def agent_reports(plane: ControlPlane, node: str, revisions: dict[str, int]) -> None:
    """Write, as the node's agent does, which revision of each pod's placement is in effect."""
    reports = [{"uid": uid, "running": True, "pinned": True, "revision": n} for uid, n in revisions.items()]
    status = {"status": {"enforcement": "nri", "pods": reports}}
    plane.request("PATCH", TOPOLOGY.format(node), status, content_type=MERGE_PATCH)


def told(plane: ControlPlane, pods: str, name: str, word: str) -> str:
    """Wait until kube-scheduler reports this of a pod, and return all that it reports."""

    def message(pod: Json) -> str:
        conditions = pod.get("status", {}).get("conditions", [])
        return next((str(one.get("message", "")) for one in conditions if one["type"] == "PodScheduled"), "")

    return message(wait_for(plane, pods, name, lambda pod: word in message(pod)))


def moving(ledger: Json) -> list[str]:
    """The UIDs of the pods that are getting other cores."""
    return [uid for uid, claim in ledger["spec"]["claims"].items() if claim.get("next")]


def revision_of(pod: Json) -> int:
    return PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT]).revision
