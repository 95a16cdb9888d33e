"""`describe-node` on a real API server: restricted namespaces admit its pod, and it writes once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from kvplace.core.errors import Conflict, ExitCode
from kvplace.core.node_topology import node_topology
from kvplace.core.scalars import NodeName
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.object_client import ObjectClient
from kvplace.kube.session import open_session
from kvplace.kube.watches import ApiKind
from kvplace.nodes.describing_pod import describing_pod
from tests.cli.calls import COMMAND, Called, call_process
from tests.doctor.conftest import Installed
from tests.nodes.machines import EIGHT, TWO

T = TypeVar("T")
TOPOLOGIES = ApiKind("nodetopologies", "kvplace.io", "v1alpha1")


def written(installed: Installed, body: Callable[[ObjectClient], Awaitable[T]]) -> T:
    async def run() -> T:
        options = CredentialOptions(str(installed.plane.kubeconfig))
        async with await open_session(options) as session:
            return await body(ObjectClient(session))

    return asyncio.run(run())


def describe_node(installed: Installed, *arguments: str) -> Called:
    return call_process("describe-node", *arguments, "--kubeconfig", str(installed.plane.kubeconfig))


def test_a_restricted_namespace_admits_the_pod(installed: Installed) -> None:
    pod = describing_pod(NodeName("worker-1"), "kvplace/serve:1", 60)
    pod["metadata"]["name"] = "describe"
    path = "/api/v1/namespaces/kvplace-system/pods?dryRun=All"
    stored = installed.plane.request("POST", path, pod)
    assert stored["spec"]["nodeName"] == "worker-1"
    assert "volumes" not in stored["spec"]
    root = {**pod["spec"], "securityContext": {}}
    with pytest.raises(Exception, match="violates PodSecurity"):
        installed.plane.request("POST", path, {**pod, "spec": root})


def test_a_description_is_written_again_by_its_writer_and_not_over_another_clients(
    installed: Installed,
) -> None:
    async def write(writer: ObjectClient) -> None:
        await writer.apply(TOPOLOGIES, node_topology("by-command", TWO), manager="describe-node")
        changed = await writer.apply(TOPOLOGIES, node_topology("by-command", EIGHT), manager="describe-node")
        assert changed["metadata"]["generation"] == 2
        with pytest.raises(Conflict):
            await writer.apply(TOPOLOGIES, node_topology("by-command", TWO), manager="somebody")

    written(installed, write)
    installed.delete(TOPOLOGIES.path("by-command"))


def test_a_node_that_is_not_there_or_that_its_agent_describes_is_left_alone(installed: Installed) -> None:
    nowhere = describe_node(installed, "nowhere")
    assert nowhere.code == ExitCode.USAGE
    assert "there is no node nowhere" in nowhere.err
    described = describe_node(installed, "worker-1", "--apply")
    assert described.code == ExitCode.USAGE
    assert "the agent of node worker-1 describes it" in described.err


def test_a_pod_that_no_kubelet_starts_is_given_up_and_deleted(installed: Installed) -> None:
    called = describe_node(installed, "worker-1", "--timeout", "1")
    assert called.code == ExitCode.FAILED
    assert "has not ended in 1 s" in called.err
    assert pods_left(installed) == []


def pods_left(installed: Installed) -> list[Any]:
    labels = "app.kubernetes.io/component=describe-node"
    found: list[Any] = installed.plane.request("GET", f"/api/v1/pods?labelSelector={labels}")["items"]
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_pod(installed: Installed, number: signal.Signals) -> None:
    kubeconfig = str(installed.plane.kubeconfig)
    command = [*COMMAND, "describe-node", "worker-1", "--timeout", "600", "--kubeconfig", kubeconfig]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not pods_left(installed):
            assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out, err.strip()) == (ExitCode.INTERRUPTED, "", "")
    assert pods_left(installed) == []


def test_a_namespace_that_is_not_there_or_has_no_room_is_named(installed: Installed) -> None:
    nowhere = describe_node(installed, "worker-1", "--pod-namespace", "nowhere")
    assert nowhere.code == ExitCode.USAGE
    assert "there is no namespace nowhere for the pod; name one with --pod-namespace" in nowhere.err
    small = installed.plane.create_namespace("small")
    most = {"type": "Container", "max": {"memory": "32Mi"}}
    limits = {"metadata": {"name": "small"}, "spec": {"limits": [most]}}
    installed.plane.request("POST", f"/api/v1/namespaces/{small}/limitranges", limits)
    refused = describe_node(installed, "worker-1", "--pod-namespace", small)
    assert refused.code == ExitCode.USAGE
    assert "the API server does not let you create pods: " in refused.err
    assert "maximum memory usage per Container is 32Mi" in refused.err
    installed.plane.remove_namespace(small)
