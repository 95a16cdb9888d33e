"""Hollow nodes: what a kubelet would do for the pods of the other tests."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import MERGE_PATCH, STRATEGIC_MERGE_PATCH, ControlPlane, RequestRefused
from harness.control_plane.container_life import Timing
from harness.control_plane.containers import SEARCH_PATH, ContainerRequest, Image, ProcessRunner
from harness.control_plane.hollow_node import NodeShape, NodesInBackground, nodes_in_background
from harness.control_plane.hollow_pod import HollowPod, Kubelet
from harness.control_plane.pod_status import Addresses
from harness.control_plane.watching import condition, is_ready, wait_for, wait_until_gone, watch_one_object
from tests.kubevirt_documents import POD_FILES

SHELL = "tests.kvplace.io/shell"
QUICK = Timing(probe_period_s=0.05, restart_backoff_s=0)


@pytest.fixture
def node_name() -> str:
    return f"hollow-{secrets.token_hex(4)}"


@pytest.fixture
def nodes(control_plane: ControlPlane, node_name: str) -> Iterator[NodesInBackground]:
    """One hollow node that runs shell containers as real processes and leaves all others hollow."""
    runner = ProcessRunner({SHELL: Image(("sh", "-c"), environment={"PATH": SEARCH_PATH})})
    with nodes_in_background(control_plane, [NodeShape(node_name)], runner=runner, timing=QUICK) as running:
        yield running


class AnsweringClient:
    """An API server that accepts every write."""

    async def persist(self, *_: Any) -> bool:
        return True


class Pods:
    """The pods of one namespace, created straight onto one node."""

    def __init__(self, plane: ControlPlane, namespace: str, node: str) -> None:
        self.plane, self.node = plane, node
        self.namespace = namespace
        self.path = f"/api/v1/namespaces/{namespace}/pods"

    def create(self, name: str, *containers: dict[str, Any], annotations: Any = None, **spec: Any) -> Any:
        containers = containers or ({"name": "main", "image": "example.test/plain"},)
        metadata = {"name": name, "annotations": annotations or {}}
        return self.plane.request(
            "POST",
            self.path,
            {"metadata": metadata, "spec": {"nodeName": self.node, "containers": list(containers), **spec}},
        )

    def shell(self, script: str, **container: Any) -> dict[str, Any]:
        return {"name": "main", "image": SHELL, "args": [script], **container}

    def wait(self, name: str, holds: Any) -> Any:
        return wait_for(self.plane, self.path, name, holds)

    def annotate(self, name: str, key: str, value: str | None) -> Any:
        body = {"metadata": {"annotations": {key: value}}}
        return self.plane.request("PATCH", f"{self.path}/{name}", body, content_type=MERGE_PATCH)


@pytest.fixture
def pods(control_plane: ControlPlane, namespace: str, node_name: str, nodes: NodesInBackground) -> Pods:
    return Pods(control_plane, namespace, node_name)


def main(pod: dict[str, Any]) -> dict[str, Any]:
    """The status of the pod's first container, empty before the hollow node has reported anything."""
    statuses: list[dict[str, Any]] = pod["status"].get("containerStatuses") or [{}]
    return statuses[0]


def podinfo(key: str) -> dict[str, Any]:
    return {
        "name": "podinfo",
        "downwardAPI": {
            "items": [
                {"path": "cpu-map", "fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}},
                {"path": "pod/uid", "fieldRef": {"fieldPath": "metadata.uid"}},
                {"path": "pod/name", "fieldRef": {"fieldPath": "metadata.name"}},
            ]
        },
    }


PODINFO_MOUNT = {"name": "podinfo", "mountPath": "/etc/podinfo"}


def test_a_plain_pod_becomes_ready_with_an_address_of_its_own(pods: Pods) -> None:
    pods.create("one")
    pods.create("two")
    one, two = pods.wait("one", is_ready), pods.wait("two", is_ready)
    assert one["status"]["phase"] == "Running"
    assert main(one)["state"].keys() == {"running"}
    assert one["status"]["podIP"] != two["status"]["podIP"]
    assert one["status"]["hostIP"] == two["status"]["hostIP"]
    assert {kind for kind in ("PodScheduled", "Initialized", "ContainersReady") if condition(one, kind)} == {
        "PodScheduled",
        "Initialized",
        "ContainersReady",
    }


def test_a_pod_is_held_unready_while_its_probe_fails_and_turns_unready_again(
    pods: Pods, nodes: NodesInBackground
) -> None:
    probe = {"exec": {"command": ["test", "-e", "/switch/on"]}, "failureThreshold": 1}
    pods.create(
        "probed",
        pods.shell(
            "exec sleep infinity",
            readinessProbe=probe,
            volumeMounts=[{"name": "switch", "mountPath": "/switch"}],
        ),
        volumes=[{"name": "switch", "emptyDir": {}}],
    )
    held = pods.wait("probed", lambda pod: main(pod).get("started", False))
    assert held["status"]["phase"] == "Running"
    assert condition(held, "Ready") == "False"
    assert main(held)["ready"] is False

    switch = nodes.nodes.find(pods.namespace, "probed").volumes.folder / "switch" / "on"
    switch.touch()
    pods.wait("probed", is_ready)
    switch.unlink()
    pods.wait("probed", lambda pod: condition(pod, "Ready") == "False")


def test_readiness_waits_for_the_startup_probe_which_ends_a_container_that_never_starts(pods: Pods) -> None:
    pods.create(
        "never-started",
        pods.shell(
            "exec sleep infinity",
            startupProbe={"exec": {"command": ["false"]}, "failureThreshold": 2},
            readinessProbe={"exec": {"command": ["true"]}},
        ),
        restartPolicy="Never",
        terminationGracePeriodSeconds=1,
    )
    failed = pods.wait("never-started", lambda pod: pod["status"].get("phase") == "Failed")
    assert main(failed)["started"] is False
    assert main(failed)["state"]["terminated"]["exitCode"] == 128 + 15


def test_a_container_sees_its_pod_through_files_and_environment(pods: Pods, nodes: NodesInBackground) -> None:
    created = pods.create(
        "seeing",
        pods.shell(
            'cd /etc/podinfo; cat cpu-map pod/uid pod/name; echo " $NODE $GREETING"; id -u; '
            "touch /tmp/stated; exec sleep infinity",
            env=[
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "GREETING", "value": "on-$(NODE)"},
            ],
            volumeMounts=[PODINFO_MOUNT],
            readinessProbe={"exec": {"command": ["test", "-e", "/tmp/stated"]}},
            securityContext={"runAsUser": 107},
        ),
        annotations={"cpu-map": '{"socket0":["2"]}'},
        volumes=[podinfo("cpu-map")],
    )
    pods.wait("seeing", is_ready)
    said = (nodes.nodes.folder / "seeing-main.log").read_text()
    uid = created["metadata"]["uid"]
    assert said.splitlines() == [f'{{"socket0":["2"]}}{uid}seeing {pods.node} on-{pods.node}', "107"]
    assert not Path("/etc/podinfo").exists(), "the container's mounts must be its own"


def test_a_downward_api_file_follows_the_annotation(pods: Pods, nodes: NodesInBackground) -> None:
    """The container is Ready while the annotation states "yes": so the probe reads the file that changes."""
    pods.create(
        "following",
        pods.shell(
            "exec sleep infinity",
            volumeMounts=[PODINFO_MOUNT],
            readinessProbe={
                "exec": {"command": ["sh", "-c", 'test "$(cat /etc/podinfo/cpu-map)" = yes']},
                "failureThreshold": 1,
            },
        ),
        volumes=[podinfo("answer")],
    )
    pods.wait("following", lambda pod: condition(pod, "Ready") == "False")
    file = nodes.nodes.find(pods.namespace, "following").volumes.folder / "podinfo" / "cpu-map"
    assert file.read_text() == "", "a missing annotation is an empty file"
    pods.annotate("following", "answer", "yes")
    pods.wait("following", is_ready)
    pods.annotate("following", "answer", None)
    pods.wait("following", lambda pod: condition(pod, "Ready") == "False")


def test_an_exited_container_is_started_again_where_the_pod_reports_it(pods: Pods) -> None:
    pods.create("again", pods.shell("exit 3"), restartPolicy="OnFailure")
    again = pods.wait("again", lambda pod: main(pod).get("restartCount", 0) >= 2)
    assert again["status"]["phase"] == "Running"
    assert main(again)["lastState"]["terminated"]["exitCode"] == 3


def test_a_readiness_gate_is_left_to_others_and_waited_for(pods: Pods, control_plane: ControlPlane) -> None:
    pods.create("gated", readinessGates=[{"conditionType": "kvplace.io/Pinned"}])
    waiting = pods.wait("gated", lambda pod: condition(pod, "ContainersReady") == "True")
    assert condition(waiting, "Ready") == "False"
    assert condition(waiting, "kvplace.io/Pinned") == ""
    control_plane.request(
        "PATCH",
        f"{pods.path}/gated/status",
        {"status": {"conditions": [{"type": "kvplace.io/Pinned", "status": "True"}]}},
        content_type=STRATEGIC_MERGE_PATCH,
    )
    ready = pods.wait("gated", is_ready)
    assert condition(ready, "kvplace.io/Pinned") == "True", "a kubelet keeps conditions of others"


def test_init_containers_and_sidecars_come_first(pods: Pods) -> None:
    pods.create(
        "ordered",
        {
            **pods.shell("test -e /work/made; exec sleep infinity"),
            "volumeMounts": [{"name": "work", "mountPath": "/work"}],
        },
        initContainers=[
            {"name": "hollow-init", "image": "example.test/plain"},
            {"name": "log", "image": "example.test/plain", "restartPolicy": "Always"},
            {
                **pods.shell("touch /work/made"),
                "name": "maker",
                "volumeMounts": [{"name": "work", "mountPath": "/work"}],
            },
        ],
        volumes=[{"name": "work", "emptyDir": {}}],
    )
    ready = pods.wait("ordered", is_ready)
    states = {entry["name"]: entry["state"] for entry in ready["status"]["initContainerStatuses"]}
    assert states["hollow-init"]["terminated"]["exitCode"] == 0
    assert states["maker"]["terminated"]["exitCode"] == 0
    assert "running" in states["log"]


def test_a_pod_runs_until_its_sidecars_have_ended_after_its_main_containers(
    pods: Pods, nodes: NodesInBackground
) -> None:
    sidecar = pods.shell('trap "exit 0" TERM; touch /tmp/up; while :; do sleep 0.05; done')
    probe = {"exec": {"command": ["test", "-e", "/tmp/up"]}}
    pods.create(
        "attended",
        initContainers=[{**sidecar, "name": "sidecar", "restartPolicy": "Always", "startupProbe": probe}],
        restartPolicy="Never",
    )
    pods.wait("attended", is_ready)
    nodes.do(nodes.nodes.end_container(pods.namespace, "attended", "main", 2))
    ended = pods.wait("attended", lambda pod: pod["status"]["phase"] == "Failed")
    (status,) = ended["status"]["initContainerStatuses"]
    assert status["state"]["terminated"]["exitCode"] == 0


def test_a_deleted_pod_is_gone_only_after_its_containers_have_ended(
    pods: Pods, nodes: NodesInBackground, control_plane: ControlPlane
) -> None:
    pods.create("going", restartPolicy="Never")
    pods.wait("going", is_ready)
    nodes.do(nodes.nodes.hold_termination(pods.namespace, "going"))
    control_plane.request("DELETE", f"{pods.path}/going")
    going = pods.wait("going", lambda pod: "deletionTimestamp" in pod["metadata"])
    assert "running" in main(going)["state"]

    nodes.do(nodes.nodes.end_container(pods.namespace, "going", "main", 0))
    ended = pods.wait("going", lambda pod: pod["status"]["phase"] == "Succeeded")
    assert main(ended)["state"]["terminated"]["exitCode"] == 0

    nodes.do(nodes.nodes.allow_termination(pods.namespace, "going"))
    wait_until_gone(control_plane, pods.path, "going")


@pytest.mark.parametrize("steps", range(10))
async def test_a_pod_may_be_deleted_while_a_hollow_init_container_starts(tmp_path: Path, steps: int) -> None:
    """`steps` moves the deletion over every turn of the event loop around the start of the container."""
    may_end = asyncio.Event()

    async def start_slowly(request: ContainerRequest) -> None:
        may_end.set()
        for _ in range(steps):
            await asyncio.sleep(0)

    kubelet = Kubelet(AnsweringClient(), tmp_path, start_slowly, QUICK, lambda pod: may_end)  # type: ignore[arg-type]
    container = {"name": "main", "image": "example.test/plain"}
    deleted = {
        "metadata": {
            "name": "pod",
            "namespace": "default",
            "uid": "0",
            "deletionTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"initContainers": [{**container, "name": "first"}], "containers": [container]},
        "status": {},
    }
    pod = HollowPod(kubelet, deleted, Addresses("192.0.2.1", "198.51.100.1"))
    await pod.run()
    assert pod.containers.are_over


def test_a_process_gets_its_grace_period_and_its_end_is_reported(
    pods: Pods, control_plane: ControlPlane
) -> None:
    pods.create(
        "polite",
        pods.shell(
            'trap "exit 7" TERM; touch /tmp/up; while :; do sleep 0.05; done',
            readinessProbe={"exec": {"command": ["test", "-e", "/tmp/up"]}},
        ),
        restartPolicy="Never",
    )
    ready = pods.wait("polite", is_ready)
    # Watched from before its deletion: it is gone a moment after its end was reported.
    with watch_one_object(control_plane, pods.path, "polite", ready["metadata"]["resourceVersion"]) as events:
        control_plane.request("DELETE", f"{pods.path}/polite")
        ended = next(event["object"] for event in events if event["object"]["status"]["phase"] == "Failed")
        assert main(ended)["state"]["terminated"]["exitCode"] == 7
        assert any(event["type"] == "DELETED" for event in events)


def test_a_pod_that_a_hollow_node_cannot_run_reports_it(pods: Pods) -> None:
    pods.create(
        "wanting",
        pods.shell(
            "true", env=[{"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
        ),
    )

    def is_refused(pod: Any) -> bool:
        state = main(pod).get("state", {})
        return "secretKeyRef" in state.get("waiting", {}).get("message", "")

    assert pods.wait("wanting", is_refused)["status"]["phase"] == "Pending"


def test_nodes_come_with_the_labels_and_resources_that_kubevirt_and_the_scheduler_need(
    control_plane: ControlPlane, nodes: NodesInBackground
) -> None:
    name = f"big-{secrets.token_hex(4)}"
    shape = NodeShape(name, cpus=64, reserved_cpus=2, hugepages={"1Gi": "16Gi"}, labels={"zone": "a"})
    nodes.do(nodes.nodes.add(shape))
    node = control_plane.request("GET", f"/api/v1/nodes/{name}")
    assert node["status"]["allocatable"] == {
        "cpu": "62",
        "memory": "64Gi",
        "pods": "250",
        "ephemeral-storage": "500Gi",
        "hugepages-1Gi": "16Gi",
        "devices.kubevirt.io/kvm": "1k",
        "devices.kubevirt.io/tun": "1k",
        "devices.kubevirt.io/vhost-net": "1k",
    }
    assert node["metadata"]["labels"].items() >= {"kubevirt.io/schedulable": "true", "zone": "a"}.items()
    assert "taints" not in node["spec"]

    nodes.do(nodes.nodes.remove(name))
    with pytest.raises(RequestRefused) as refused:
        control_plane.request("GET", f"/api/v1/nodes/{name}")
    assert refused.value.status == 404


def test_every_kind_of_virt_launcher_pod_gets_its_containers_ready_and_waits_for_kubevirts_gate(
    pods: Pods, control_plane: ControlPlane
) -> None:
    names = []
    for file in POD_FILES:
        pod = json.loads(file.read_text())
        pod["metadata"].pop("ownerReferences")
        pod["spec"]["nodeName"] = pods.node
        names.append(control_plane.request("POST", pods.path, pod)["metadata"]["name"])
    assert len(names) > 10
    for name in names:
        ready = pods.wait(name, lambda pod: condition(pod, "ContainersReady") == "True")
        assert ready["status"]["phase"] == "Running"
        gates = [gate["conditionType"] for gate in ready["spec"].get("readinessGates", [])]
        assert gates == ["kubevirt.io/virtual-machine-unpaused"]
        assert condition(ready, "Ready") == "False"


STARTER = """
import sys
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.containers import Image, ProcessRunner
from harness.control_plane.hollow_node import NodeShape, nodes_in_background
from harness.control_plane.watching import is_ready, wait_for

runner = ProcessRunner({"shell": Image(("sleep", "infinity"))})
with ControlPlane() as plane, nodes_in_background(plane, [NodeShape("n")], runner=runner) as nodes:
    spec = {"nodeName": "n", "containers": [{"name": "main", "image": "shell"}]}
    path = "/api/v1/namespaces/default/pods"
    plane.request("POST", path, {"metadata": {"name": "p"}, "spec": spec})
    wait_for(plane, path, "p", is_ready)
    print(nodes.nodes.find("default", "p").containers.named("main").running.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures("kubernetes_programs")
def test_a_container_dies_with_the_process_that_started_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        container = os.pidfd_open(int(starter.stdout.readline()))
        starter.kill()
    # A pidfd turns readable when its process has ended.
    ended, _, _ = select.select([container], [], [], 60)
    os.close(container)
    assert ended
