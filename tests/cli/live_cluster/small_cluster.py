"""A small cluster on the real API server, as kvplace, kubelets and agents leave it behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.control_plane.cluster import STRATEGIC_MERGE_PATCH, ControlPlane, Json, RequestRefused
from kvplace.core.allocator.allocate import place
from kvplace.core.ledger import Claim, LedgerChange, claim_of, merge_patch, read_ledger
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Request
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import PodUid
from kvplace.core.well_known_names import PINNED, PLACED_LABEL, PLACEMENT, REQUEST
from tests.cli.calls import Called

MANIFESTS = Path(__file__).resolve().parents[3] / "manifests"
OURS = "/apis/kvplace.io/v1alpha1"
MERGE_PATCH = "application/merge-patch+json"
Call = Callable[..., Called]


@dataclass(frozen=True)
class SmallCluster:
    """Two nodes of two sockets each, and VMs in two namespaces.

    On `first`: `db` owns four CPUs of a NUMA node and is pinned, `web` shares two and is not, `cache` is a
    plain pod that owns two. `late` waits. `second` is empty, and `bare` is not described.
    """

    plane: ControlPlane
    namespace: str
    other: str
    first: str
    second: str
    bare: str


def create_node(plane: ControlPlane, name: str, tag: str) -> None:
    """Create a node with a kubelet that reports Ready."""
    path = "/api/v1/nodes"
    plane.request("POST", path, {"metadata": {"name": name, "labels": {"tag": tag}}})
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "played"}
    plane.request(
        "PATCH",
        f"{path}/{name}/status",
        {"status": {"conditions": [ready]}},
        content_type=STRATEGIC_MERGE_PATCH,
    )
    # Admission taints new nodes, and nothing here takes the taint away.
    plane.request("PATCH", f"{path}/{name}", {"spec": {"taints": None}}, content_type=MERGE_PATCH)


def run_vm(
    cluster: SmallCluster,
    namespace: str,
    name: str,
    node: ClusterNode,
    request: Request,
    *,
    vmi: bool,
    pinned: bool | None,
) -> ClusterNode:
    """Place, claim and bind a VM as `serve` does, and report as kubelet and agent; returns the node."""
    placement = place(node.topology, node.free, request)
    assert isinstance(placement, Placement)
    pod = create_pod(cluster, namespace, name, request, vmi=vmi)
    uid = PodUid(pod["metadata"]["uid"])
    path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
    bound = PodPlacement(uid, node.name, node.topology.fingerprint, OnFailure.WAIT, placement)
    claim(
        cluster,
        node.name,
        claim_of(
            uid,
            placement,
            namespace=namespace,
            pod=pod["metadata"]["name"],
            vmi=name if vmi else "",
            since="2026-01-02T03:04:05Z",
        ),
    )
    cluster.plane.request(
        "POST",
        f"{path}/binding",
        {
            "metadata": {"name": pod["metadata"]["name"], "annotations": {PLACEMENT: bound.to_json()}},
            "target": {"kind": "Node", "name": node.name},
        },
    )
    status: Json = {"phase": "Running"}
    if pinned is not None:
        message = "revision 1: every thread is in its place" if pinned else "revision 1: vCPU 0 left its CPU"
        reason = "AsPlaced" if pinned else "ThreadsElsewhere"
        condition = {"type": PINNED, "status": str(pinned), "reason": reason, "message": message}
        status["conditions"] = [condition]
    cluster.plane.request("PATCH", f"{path}/status", {"status": status}, content_type=STRATEGIC_MERGE_PATCH)
    return replace(node, running=(*node.running, Occupant(uid, request, placement)))


def create_pod(cluster: SmallCluster, namespace: str, name: str, request: Request, *, vmi: bool) -> Json:
    """Create a pod as pod admission leaves it; the pod of a VMI is named as KubeVirt names it."""
    asked = PodRequest(request, vmi=f"{namespace}/{name}" if vmi else "")
    metadata: Json = {
        "name": f"virt-launcher-{name}" if vmi else name,
        "labels": {PLACED_LABEL: "true", "app": name},
        "annotations": {REQUEST: write_request(asked)},
    }
    if vmi:
        owner = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": name}
        metadata["ownerReferences"] = [{**owner, "uid": f"vmi-{name}", "controller": True}]
    spec = {"schedulerName": "kvplace", "containers": [{"name": "compute", "image": "none"}]}
    return cluster.plane.request(
        "POST", f"/api/v1/namespaces/{namespace}/pods", {"metadata": metadata, "spec": spec}
    )


def claim(cluster: SmallCluster, node: str, *claims: Claim) -> None:
    """Write claims into a node's ledger, which is made if need be."""
    path = f"{OURS}/nodeledgers"
    with contextlib.suppress(RequestRefused):
        document = {"apiVersion": "kvplace.io/v1alpha1", "kind": "NodeLedger", "metadata": {"name": node}}
        cluster.plane.request("POST", path, {**document, "spec": {"owners": {}, "claims": {}}})
    before = read_ledger(cluster.plane.request("GET", f"{path}/{node}")["spec"])
    change = merge_patch(before, LedgerChange(claims=claims))
    cluster.plane.request("PATCH", f"{path}/{node}", {"spec": change}, content_type=MERGE_PATCH)


def release_all(cluster: SmallCluster, node: str) -> None:
    """Take all claims out of a node's ledger."""
    path = f"{OURS}/nodeledgers/{node}"
    before = read_ledger(cluster.plane.request("GET", path)["spec"])
    change = merge_patch(before, LedgerChange(releases=tuple(before.claims)))
    cluster.plane.request("PATCH", path, {"spec": change}, content_type=MERGE_PATCH)


def rows(answer: str) -> list[list[str]]:
    """Return the cells of a table; no cell of these has more than one blank in a row."""
    return [[cell.strip() for cell in line.split("   ") if cell.strip()] for line in answer.splitlines()]
