"""An agent as the API server sees it: the manifests' service account with a token that is bound to a node."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, Json

NAMESPACE = "kvplace-agent"
TOPOLOGIES = "/apis/kvplace.io/v1alpha1/nodetopologies"
RESOURCES = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
SPEC = {
    "packages": [{"id": 0, "cpus": "0-1"}],
    "numaNodes": [{"id": 0, "cpus": "0-1"}],
    "l3Groups": ["0-1"],
    "cores": ["0", "1"],
}


@dataclass
class Agent:
    """The agent of one node, by the token that the kubelet gives its pod."""

    cluster: ControlPlane
    node: str
    other: str
    token: str

    def request(self, method: str, path: str, body: Json, content_type: str = MERGE_PATCH) -> Json:
        kind = content_type if method == "PATCH" else "application/json"
        return self.cluster.request(method, path, body, content_type=kind, token=self.token)

    def create_topology(self, name: str, path: str = TOPOLOGIES) -> Json:
        return self.request("POST", path, topology(name) if path == TOPOLOGIES else resources(name))


def topology(name: str) -> Json:
    return {
        "apiVersion": "kvplace.io/v1alpha1",
        "kind": "NodeTopology",
        "metadata": {"name": name},
        "spec": SPEC,
    }


def resources(name: str) -> Json:
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": name},
        "topologyPolicies": ["None"],
        "zones": [],
    }


def cpu_map(text: str | None) -> Json:
    return {"metadata": {"annotations": {"cpu-map": text}}}


def condition(kind: str = "kvplace.io/Pinned") -> Json:
    return {"status": {"conditions": [{"type": kind, "status": "True", "reason": "AffinitiesRead"}]}}


def pod_on(cluster: ControlPlane, node: str, *, plain: bool = False) -> str:
    """Create a pod that is bound to a node, a plain one without kvplace's label; return its path."""
    path = "/api/v1/namespaces/default/pods"
    name = f"vm-{secrets.token_hex(4)}"
    containers = [{"name": "compute", "image": "example.test/launcher"}]
    spec = {"nodeName": node, "containers": containers}
    metadata = {"name": name, "labels": {} if plain else {"kvplace.io/placed": "true"}}
    cluster.request("POST", path, {"metadata": metadata, "spec": spec})
    return f"{path}/{name}"


def token_of(cluster: ControlPlane, node: str) -> str:
    """Return the token that the kubelet of a node would give its agent."""
    pod = cluster.request(
        "POST",
        f"/api/v1/namespaces/{NAMESPACE}/pods",
        {
            "metadata": {"name": f"agent-{node}"},
            "spec": {
                "nodeName": node,
                "serviceAccountName": "kvplace-agent",
                "containers": [{"name": "agent", "image": "example.test/agent"}],
            },
        },
    )
    answer = cluster.request(
        "POST",
        f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/kvplace-agent/token",
        {
            "spec": {
                "boundObjectRef": {
                    "kind": "Pod",
                    "apiVersion": "v1",
                    "name": pod["metadata"]["name"],
                    "uid": pod["metadata"]["uid"],
                }
            }
        },
    )
    token: str = answer["status"]["token"]
    return token
