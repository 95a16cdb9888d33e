"""Annotations that kvplace writes on a pod: the placement, its `cpu-map`, and Crane's result if asked for."""

from __future__ import annotations

import json

from kvplace.core.annotations import CRANE_RESULT, EXPLANATION
from kvplace.core.cpu_map import CPU_MAP, write_cpu_map
from kvplace.core.placement import PLACEMENT, Placement, PodPlacement
from kvplace.core.request_document import PodRequest
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology


def result_annotations(
    topology: Topology, bound: PodPlacement, pod_request: PodRequest, *, explanation: str = ""
) -> dict[str, str]:
    """Write a placement as annotations of its pod."""
    placement = bound.placement
    annotations = {
        PLACEMENT: bound.to_json(),
        CPU_MAP: write_cpu_map(topology, placement.cpus_in_order),
    }
    if pod_request.crane_result:
        annotations[CRANE_RESULT] = _crane_result(topology, placement)
    if pod_request.explain and explanation:
        annotations[EXPLANATION] = explanation
    return annotations


def floating_annotations(*, pod_uid: PodUid, node: NodeName) -> dict[str, str]:
    """Write as annotations that a pod runs unpinned."""
    return {PLACEMENT: PodPlacement.floating(pod_uid=pod_uid, node=node).to_json()}


def _crane_result(topology: Topology, placement: Placement) -> str:
    """Write the CPUs by NUMA node as Crane's `topology-result` (gocrane/api topology v1alpha1 ZoneList)."""
    return json.dumps(
        [
            {
                "name": f"node{node}",
                "type": "Node",
                "resources": {
                    "capacity": {"cpu": str((topology.node_by_id[node].cpus & placement.cpus).bit_count())}
                },
            }
            for node in placement.numa_nodes
        ],
        separators=(",", ":"),
    )
