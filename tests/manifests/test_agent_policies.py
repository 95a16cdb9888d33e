"""What the API server refuses to an agent: everything that is not about its own node."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from harness.control_plane.cluster import (
    MERGE_PATCH,
    STRATEGIC_MERGE_PATCH,
    ControlPlane,
    Json,
    RequestRefused,
)
from tests.manifests.policies import refused

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


@pytest.fixture(scope="module")
def agent(cluster: ControlPlane) -> Iterator[Agent]:
    """Give an agent once the policies that limit it are in force."""
    manifests = cluster.kubectl("get", "daemonset", "-n", NAMESPACE, "-o", "name")
    assert manifests.strip() == "daemonset.apps/kvplace-agent"
    node, other = (f"{name}-{secrets.token_hex(4)}" for name in ("mine", "other"))
    for name in (node, other):
        body: Json = {"metadata": {"name": name, "labels": {"rack": "a"}}}
        cluster.request("POST", "/api/v1/nodes", body)
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
    token = cluster.request(
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
    )["status"]["token"]
    found = Agent(cluster, node, other, token)
    refused(lambda: found.create_topology(other, f"{TOPOLOGIES}?dryRun=All"))
    refused(lambda: found.request("PATCH", f"/api/v1/nodes/{other}?dryRun=All", cpu_map("{}")))
    refused(lambda: found.request("PATCH", f"{pod_on(cluster, other)}/status?dryRun=All", condition()))
    yield found
    for name in (node, other):
        cluster.request("DELETE", f"/api/v1/nodes/{name}")


def cpu_map(text: str | None) -> Json:
    return {"metadata": {"annotations": {"cpu-map": text}}}


def condition(kind: str = "kvplace.io/Pinned") -> Json:
    return {"status": {"conditions": [{"type": kind, "status": "True", "reason": "AffinitiesRead"}]}}


def pod_on(cluster: ControlPlane, node: str) -> str:
    """Create a pod that is bound to a node; return its path."""
    path = "/api/v1/namespaces/default/pods"
    name = f"vm-{secrets.token_hex(4)}"
    containers = [{"name": "compute", "image": "example.test/launcher"}]
    spec = {"nodeName": node, "containers": containers}
    cluster.request("POST", path, {"metadata": {"name": name}, "spec": spec})
    return f"{path}/{name}"


@pytest.mark.parametrize("path", [TOPOLOGIES, RESOURCES])
def test_an_agent_writes_the_topology_of_its_own_node(
    agent: Agent, resource_topologies: None, path: str
) -> None:
    agent.create_topology(agent.node, path)
    changed: Json = {"spec": {**SPEC, "reserved": "0"}} if path == TOPOLOGIES else {"zones": []}
    agent.request("PATCH", f"{path}/{agent.node}", changed)


@pytest.mark.parametrize("path", [TOPOLOGIES, RESOURCES])
def test_an_agent_writes_no_topology_of_another_node(
    agent: Agent, resource_topologies: None, path: str
) -> None:
    with pytest.raises(RequestRefused, match="only the topology of the node that it runs on") as refusal:
        agent.create_topology(agent.other, path)
    assert refusal.value.status == 403
    body = topology(agent.other) if path == TOPOLOGIES else resources(agent.other)
    agent.cluster.request("POST", path, body)
    with pytest.raises(RequestRefused, match="only the topology"):
        agent.request("PATCH", f"{path}/{agent.other}", {"metadata": {"labels": {"a": "b"}}})
    if path == TOPOLOGIES:
        with pytest.raises(RequestRefused, match="only the topology"):
            agent.request("PATCH", f"{path}/{agent.other}/status", {"status": {"kubeletCpus": "1"}})


def test_a_token_that_is_bound_to_no_pod_may_write_nothing(agent: Agent) -> None:
    token = agent.cluster.service_account_token(NAMESPACE, "kvplace-agent")
    for method, path, body in (
        ("POST", TOPOLOGIES, topology(f"new-{agent.node}")),
        ("PATCH", f"/api/v1/nodes/{agent.node}", cpu_map("{}")),
    ):
        kind = MERGE_PATCH if method == "PATCH" else "application/json"
        with pytest.raises(RequestRefused, match="that it runs on"):
            agent.cluster.request(method, path, body, content_type=kind, token=token)


def test_an_agent_may_set_the_cpu_map_of_its_node(agent: Agent) -> None:
    for text in ('{"socket0":["1"]}', '{"socket0":["2"]}', None):
        after = agent.request("PATCH", f"/api/v1/nodes/{agent.node}", cpu_map(text))
        assert after["metadata"].get("annotations", {}).get("cpu-map") == text


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"labels": {"rack": "b"}}},
        {"metadata": {"annotations": {"kvplace.io/released-at": "now"}}},
        {"metadata": {"finalizers": ["example.test/stay"]}},
        {"spec": {"unschedulable": True}},
        {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}},
    ],
    ids=str,
)
def test_an_agent_may_change_nothing_else_of_its_node(agent: Agent, change: Json) -> None:
    with pytest.raises(RequestRefused, match="only the annotation cpu-map of its node"):
        agent.request("PATCH", f"/api/v1/nodes/{agent.node}", change)


def test_an_agent_says_of_its_own_pods_whether_they_are_pinned(agent: Agent) -> None:
    path = pod_on(agent.cluster, agent.node)
    after = agent.request("PATCH", f"{path}/status", condition(), STRATEGIC_MERGE_PATCH)
    assert "kvplace.io/Pinned" in {entry["type"] for entry in after["status"]["conditions"]}
    there = pod_on(agent.cluster, agent.other)
    with pytest.raises(RequestRefused, match="only the status of pods of the node that it runs on"):
        agent.request("PATCH", f"{there}/status", condition(), STRATEGIC_MERGE_PATCH)


@pytest.mark.parametrize(
    "change",
    [
        condition("Ready"),
        condition("kvplace.io/Relocated"),
        {"status": {"phase": "Failed"}},
        {"status": {"observedGeneration": 99}},
        {"status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}},
        {"status": {"containerStatuses": [{"name": "compute", "image": "a", "imageID": "", "ready": True}]}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"labels": {"a": "b"}}},
        {"metadata": {"annotations": {"kvplace.io/placement": "{}"}}},
    ],
    ids=str,
)
def test_an_agent_may_change_nothing_else_of_its_pods(agent: Agent, change: Json) -> None:
    path = pod_on(agent.cluster, agent.node)
    with pytest.raises(RequestRefused, match=r"only the condition kvplace\.io/Pinned|results of kvplace"):
        agent.request("PATCH", f"{path}/status", change, STRATEGIC_MERGE_PATCH)


def test_an_agent_writes_events_in_its_own_name_only(agent: Agent) -> None:
    def event(controller: str) -> Json:
        return {
            "metadata": {"generateName": "vm-", "namespace": "default"},
            "eventTime": "2026-11-22T10:00:00.000000Z",
            "reportingController": controller,
            "reportingInstance": "agent",
            "type": "Warning",
            "reason": "Drift",
            "action": "Pinning",
            "regarding": {"kind": "Pod", "namespace": "default", "name": "vm"},
        }

    path = "/apis/events.k8s.io/v1/namespaces/default/events"
    refused(lambda: agent.request("POST", f"{path}?dryRun=All", event("kubelet")))
    agent.request("POST", path, event("kvplace.io/agent"))


def test_the_policies_do_not_limit_others(agent: Agent) -> None:
    agent.cluster.request(
        "PATCH",
        f"/api/v1/nodes/{agent.other}",
        {"metadata": {"labels": {"rack": "b"}}},
        content_type=MERGE_PATCH,
    )
    agent.cluster.request(
        "PATCH",
        f"{pod_on(agent.cluster, agent.other)}/status",
        {"status": {"phase": "Running"}},
        content_type=STRATEGIC_MERGE_PATCH,
    )


@pytest.fixture(scope="module")
def resource_topologies(cluster: ControlPlane, manifests: object) -> None:
    """Install the kind NodeResourceTopology, as docs/agent.md says."""
    cluster.kubectl("apply", "--server-side", "-k", f"{manifests}/node-resource-topology")
    cluster.kubectl("wait", "--for=condition=Established", "crd/noderesourcetopologies.topology.node.k8s.io")
