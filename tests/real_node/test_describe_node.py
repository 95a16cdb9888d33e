"""`describe-node` on a real node: its pod sees the same machine as the agent, and is gone afterwards."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, Json
from harness.control_plane.watching import wait_for
from harness.real_node.cluster import RealCluster
from harness.real_node.kvplace_pods import AGENT
from kvplace import __version__
from kvplace.core.errors import ExitCode
from tests.cli.calls import Called, call_process
from tests.docs.blocks import block

TOPOLOGIES = "/apis/kvplace.io/v1alpha1/nodetopologies"
AGENTS = f"/apis/apps/v1/namespaces/{AGENT}/daemonsets"
DESCRIBER = "describer"
ROLES = ("edit", "kvplace-viewer")
"""With these `describe-node` prints a node; neither has the right to ask a kubelet."""
COMMON = ("packages", "l3Groups", "cores", "reserved")


def describe_node(plane: ControlPlane, *arguments: str) -> Called:
    return call_process("describe-node", *arguments, "--kubeconfig", str(plane.kubeconfig))


def assert_its_pod_is_gone(plane: ControlPlane) -> None:
    labels = "app.kubernetes.io/component=describe-node"
    assert plane.request("GET", f"/api/v1/pods?labelSelector={labels}")["items"] == []


def is_described_by_its_agent(topology: Json) -> bool:
    conditions = {one["type"]: one["status"] for one in topology.get("status", {}).get("conditions", [])}
    return conditions.get("Ready") == "True"


@pytest.fixture
def without_agent(kvplace: RealCluster) -> Iterator[Json]:
    """Take the agent and its NodeTopology away from `n1`; gives what the agent had written."""
    plane = kvplace.plane
    described: Json = wait_for(plane, TOPOLOGIES, "n1", is_described_by_its_agent)["spec"]
    _select(plane, {"kubernetes.io/hostname": "n2"}, 1)
    plane.request("DELETE", f"{TOPOLOGIES}/n1")
    yield described
    plane.kubectl("delete", "nodetopology", "n1", "--ignore-not-found")
    _select(plane, {"kubernetes.io/hostname": None}, 2)
    wait_for(plane, TOPOLOGIES, "n1", is_described_by_its_agent)


def _select(plane: ControlPlane, selector: Json, agents: int) -> None:
    """Let agents run on these nodes only, and wait until they do."""
    change = {"spec": {"template": {"spec": {"nodeSelector": selector}}}}
    stored = plane.request("PATCH", f"{AGENTS}/{AGENT}", change, content_type=MERGE_PATCH)
    generation = stored["metadata"]["generation"]

    def is_done(found: Json) -> bool:
        status = found.get("status", {})
        return bool(
            status.get("observedGeneration", 0) >= generation
            and status.get("updatedNumberScheduled", 0) == agents
            and status.get("numberReady", 0) == agents
            and status.get("numberMisscheduled", 0) == 0
        )

    wait_for(plane, AGENTS, AGENT, is_done)


def test_the_pod_sees_the_machine_that_the_agent_sees(kvplace: RealCluster) -> None:
    plane = kvplace.plane
    agents = wait_for(plane, TOPOLOGIES, "n1", is_described_by_its_agent)["spec"]
    called = describe_node(plane, "n1", "--reserved", agents["reserved"])
    assert called.code == ExitCode.DONE, called.err
    described = json.loads(called.out)
    assert described["metadata"]["name"] == "n1"
    for level in COMMON:
        assert described["spec"][level] == agents[level]
    assert_its_pod_is_gone(plane)


def test_the_commands_of_the_page_describe_a_node_without_an_agent(
    kvplace: RealCluster, without_agent: Json
) -> None:
    plane = kvplace.plane
    looked, applied = block("docs/install.md", "kubectl kvplace describe-node").splitlines()
    assert "--reserved" not in looked
    printed = run_on_n1(plane, looked)
    seen = json.loads(printed.out)["spec"]
    for level in COMMON:
        assert seen[level] == without_agent[level]
    assert "CPU 0 is reserved, as the kubelet's reservedSystemCPUs state" in printed.err

    run_on_n1(plane, applied.replace("0-1,32-33", "1"))
    stored = plane.request("GET", f"{TOPOLOGIES}/n1")["spec"]
    assert [stored[level] for level in COMMON] == [*(seen[level] for level in COMMON[:-1]), "1"]


def run_on_n1(plane: ControlPlane, command: str) -> Called:
    """Run a command of the page, with `n1` for its `worker-1`."""
    words = shlex.split(command.removeprefix("kubectl kvplace ").replace("worker-1", "n1"))
    called = describe_node(plane, *words[1:])
    assert called.code == ExitCode.DONE, called.err
    assert_its_pod_is_gone(plane)
    return called


@pytest.mark.parametrize(("node", "reserved"), [("n1", "0"), ("n2", "1")])
def test_each_nodes_own_kubelet_is_asked_which_cpus_it_reserves(
    kvplace: RealCluster, node: str, reserved: str
) -> None:
    called = describe_node(kvplace.plane, node)
    assert called.code == ExitCode.DONE, called.err
    assert json.loads(called.out)["spec"]["reserved"] == reserved
    assert f"CPU {reserved} is reserved, as the kubelet's reservedSystemCPUs state" in called.err


def test_who_may_not_ask_the_kubelet_is_informed_and_gets_the_core_of_the_lowest_cpu(
    kvplace: RealCluster,
) -> None:
    plane = kvplace.plane
    bindings = [f"{DESCRIBER}-{role}" for role in ROLES]
    for binding, role in zip(bindings, ROLES, strict=True):
        plane.kubectl("create", "clusterrolebinding", binding, f"--clusterrole={role}", f"--user={DESCRIBER}")
    try:
        called = describe_node(plane, "n2", "--as", DESCRIBER)
    finally:
        plane.kubectl("delete", "clusterrolebinding", *bindings)
    assert called.code == ExitCode.DONE, called.err
    spec = json.loads(called.out)["spec"]
    assert spec["reserved"] == spec["cores"][0]
    assert "were not read (you may not get nodes/proxy)" in called.err


def test_an_image_that_is_not_there_is_named_and_nothing_is_left(kvplace: RealCluster) -> None:
    image = "registry.invalid/kvplace/serve:9"
    called = describe_node(kvplace.plane, "n1", "--image", image)
    assert called.code == ExitCode.USAGE
    assert f"image {image} cannot run on the node" in called.err
    assert "--image" in called.err
    assert_its_pod_is_gone(kvplace.plane)


def test_an_image_without_the_command_is_named_and_nothing_is_left(kvplace: RealCluster) -> None:
    hook = f"kvplace/hook:{__version__}"
    called = describe_node(kvplace.plane, "n1", "--image", hook)
    assert called.code == ExitCode.USAGE
    assert f"image {hook} cannot run on the node" in called.err
    assert_its_pod_is_gone(kvplace.plane)
