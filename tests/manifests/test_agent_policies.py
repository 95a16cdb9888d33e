"""The API server refuses an agent every write that is not about its own node."""

from __future__ import annotations

import pytest

from harness.control_plane.cluster import MERGE_PATCH, STRATEGIC_MERGE_PATCH, Json, RequestRefused
from tests.manifests.agents import (
    NAMESPACE,
    RESOURCES,
    SPEC,
    TOPOLOGIES,
    Agent,
    condition,
    cpu_map,
    pod_on,
    resources,
    topology,
)
from tests.manifests.policies import refused


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


def test_an_agent_reports_of_its_own_pods_whether_they_are_pinned(agent: Agent) -> None:
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


def test_an_agent_leaves_pods_without_kvplaces_label_alone(agent: Agent) -> None:
    path = pod_on(agent.cluster, agent.node, plain=True)
    with pytest.raises(RequestRefused, match="only pods with the label") as refusal:
        agent.request("PATCH", f"{path}/status", condition(), STRATEGIC_MERGE_PATCH)
    assert refusal.value.status == 403


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
