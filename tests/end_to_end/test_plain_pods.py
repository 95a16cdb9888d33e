"""Pods without a VM ask with the same keys, on nodes that only a person has described."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.control_plane.cluster import ControlPlane, RequestRefused
from harness.control_plane.hollow_node import NodeShape, nodes_in_background
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation
from kvplace.core.placement import PodPlacement
from kvplace.core.well_known_names import PLACEMENT

BY_HAND = {"cpu-map": json.dumps({"socket0": ["1", "2", "3"], "socket1": ["5", "6", "7"]})}


def pod_manifest(name: str, cpus: str, annotations: dict[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "annotations": annotations},
        "spec": {
            "containers": [
                {"name": "work", "image": "work.test/work", "resources": {"limits": {"cpu": cpus}}}
            ]
        },
    }


def test_a_plain_pod_with_a_request_in_cranes_words_is_placed_by_a_hand_written_map_and_answered_in_them(
    cluster: ControlPlane, kvplace: Installation, vm_namespace: str
) -> None:
    pods = f"/api/v1/namespaces/{vm_namespace}/pods"
    with nodes_in_background(cluster, [NodeShape("by-hand", cpus=8, annotations=BY_HAND)]):
        asks = {"topology.crane.io/topology-awareness": "true"}
        cluster.request("POST", pods, pod_manifest("crane", "3", asks))
        bound = wait_for(cluster, pods, "crane", lambda pod: bool(pod["spec"].get("nodeName")))

        annotations = bound["metadata"]["annotations"]
        placement = PodPlacement.from_json(annotations[PLACEMENT]).placement
        assert json.loads(annotations["cpu-map"]) == {"socket0": ["1", "2", "3"]}
        assert placement.vcpus == (1, 2, 3)
        assert json.loads(annotations["topology.crane.io/topology-result"]) == [
            {"name": "node0", "type": "Node", "resources": {"capacity": {"cpu": "3"}}}
        ]
        cluster.request("DELETE", f"{pods}/crane", {"gracePeriodSeconds": 0})
        ledgers = "/apis/kvplace.io/v1alpha1/nodeledgers"
        wait_for(cluster, ledgers, "by-hand", lambda ledger: not ledger["spec"]["owners"])


def test_a_plain_pod_that_fits_no_described_node_waits_with_the_shortfall(
    cluster: ControlPlane, kvplace: Installation, vm_namespace: str
) -> None:
    pods = f"/api/v1/namespaces/{vm_namespace}/pods"
    shapes = [NodeShape("by-hand", cpus=16, annotations=BY_HAND), NodeShape("nobody-knows", cpus=16)]
    with nodes_in_background(cluster, shapes):
        cluster.request("POST", pods, pod_manifest("large", "4", {"cpu-set": "one-socket"}))
        sentences = (
            "1 no socket with 4 free CPUs, best 3 on by-hand socket 0",
            "1 neither a NodeTopology object nor a cpu-map annotation describes the node",
        )
        wait_for(cluster, pods, "large", lambda pod: all(one in _why_not(pod) for one in sentences))


def test_a_fraction_of_a_cpu_is_refused_when_the_pod_is_created(
    cluster: ControlPlane, kvplace: Installation, vm_namespace: str
) -> None:
    with pytest.raises(RequestRefused, match=r"whole number"):
        cluster.request(
            "POST",
            f"/api/v1/namespaces/{vm_namespace}/pods",
            pod_manifest("fraction", "1500m", {"cpu-set": "one-socket"}),
        )


def _why_not(pod: dict[str, Any]) -> str:
    conditions = pod.get("status", {}).get("conditions", [])
    return next(
        (str(entry.get("message", "")) for entry in conditions if entry["type"] == "PodScheduled"), ""
    )
