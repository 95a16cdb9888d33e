"""Sixty pods that wait when kube-scheduler starts: planned together, claimed node by node, nominated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import SIDECAR_IMAGE, Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape, two_socket_machine
from kvplace.admission.objects import AdmissionSettings
from kvplace.admission.pod import admit_pod
from kvplace.core.placement import PodPlacement
from kvplace.core.well_known_names import PLACEMENT

COUNT = 60
PODS = "/api/v1/namespaces/default/pods"
MACHINES = {f"node-{number}": two_socket_machine(cores_per_socket=16) for number in range(5)}


@pytest.fixture(scope="module")
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane of its own, in which no other client creates pods."""
    with ControlPlane() as running:
        yield running


@pytest.fixture(scope="module")
def kvplace(plane: ControlPlane) -> Iterator[Installation]:
    """Install kvplace, one replica that nominates in the smallest cluster."""
    with Installation(plane, webhooks=False, flags=["--nominate-from-nodes=1"]) as installation:
        yield installation
        assert installation.replicas[0].denials() == []


def admitted(name: str, vcpus: int) -> dict[str, Any]:
    """Make a pod as pod admission makes it."""
    size = {"cpu": str(vcpus), "memory": "1Gi"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {"cpu-set": "one-numa"}},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [
                {"name": "main", "image": "example.test/vm", "resources": {"requests": size, "limits": size}}
            ],
        },
    }
    made = admit_pod(pod, namespace="default", settings=AdmissionSettings(sidecar_image=SIDECAR_IMAGE))
    document = dict(made.object)
    del document["metadata"]["annotations"]["cpu-set"]
    return document


def counted(kvplace: Installation, metric: str) -> float:
    """Read a metric of the replica."""
    found = re.search(rf"^{re.escape(metric)} (\S+)$", kvplace.replicas[0].metrics(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_sixty_pods_are_claimed_in_about_one_write_per_node_and_nominated(
    plane: ControlPlane, kvplace: Installation
) -> None:
    for name, machine in MACHINES.items():
        plane.request("POST", "/api/v1/nodes", node_shape(name, machine).manifest("172.16.0.1"))
    names = [f"vm-{number}" for number in range(COUNT)]
    with described_nodes(kvplace, MACHINES), ThreadPoolExecutor(8) as pool:
        for number, name in enumerate(names):
            pool.submit(plane.request, "POST", PODS, admitted(name, (2, 4)[number % 2]))
        pool.shutdown()
        scheduler = kvplace.add_scheduler(kvplace.replicas[0])
        pods = [wait_for(plane, PODS, name, lambda pod: bool(pod["spec"].get("nodeName"))) for name in names]
        scheduler.stop()
        taken: dict[str, int] = {}
        for pod in pods:
            node = pod["spec"]["nodeName"]
            owned = PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT]).placement.owned
            assert not owned & taken.get(node, 0)
            taken[node] = taken.get(node, 0) | owned
            assert "nominatedNodeName" not in pod["status"]
        for node, cpus in taken.items():
            ledger = plane.request("GET", f"/apis/kvplace.io/v1alpha1/nodeledgers/{node}")["spec"]
            assert len(ledger["owners"]) == cpus.bit_count()
        assert counted(kvplace, "kvplace_ledger_write_seconds_count") <= 2 * len(taken)
        # How many come in time depends on how fast kube-scheduler is over so few nodes.
        assert counted(kvplace, 'kvplace_extender_nominations_total{outcome="written"}') > 0
