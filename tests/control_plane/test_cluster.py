"""The control plane itself: what other tests take for granted about it."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import (
    STRATEGIC_MERGE_PATCH,
    ControlPlane,
    KubectlFailed,
    RequestRefused,
)
from harness.control_plane.watching import watch_one_object


def plain_pod(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": "example.test/plain"}], **spec},
    }


@pytest.fixture
def node(control_plane: ControlPlane) -> Iterator[str]:
    """Create a node without a kubelet."""
    name = f"bare-{secrets.token_hex(4)}"
    room = {"cpu": "8", "memory": "16Gi", "pods": "110"}
    control_plane.request(
        "POST",
        "/api/v1/nodes",
        {"metadata": {"name": name}, "status": {"capacity": room, "allocatable": room}},
    )
    yield name
    control_plane.request("DELETE", f"/api/v1/nodes/{name}")


def test_no_client_is_anonymous(control_plane: ControlPlane) -> None:
    with pytest.raises(RequestRefused) as refused:
        control_plane.request("GET", "/api/v1/namespaces", token="not-a-token")
    assert refused.value.status == 401


def test_a_service_account_without_a_binding_is_refused_and_one_with_a_binding_is_not(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.create_service_account(namespace, "reader")
    token = control_plane.service_account_token(namespace, "reader")
    pods = f"/api/v1/namespaces/{namespace}/pods"

    with pytest.raises(
        RequestRefused, match=f"system:serviceaccount:{namespace}:reader.* cannot list"
    ) as refused:
        control_plane.request("GET", pods, token=token)
    assert refused.value.status == 403

    control_plane.kubectl("-n", namespace, "create", "role", "reader", "--verb=list", "--resource=pods")
    control_plane.kubectl(
        *("-n", namespace, "create", "rolebinding", "reader"),
        *("--role=reader", f"--serviceaccount={namespace}:reader"),
    )
    assert control_plane.request("GET", pods, token=token)["items"] == []


def test_a_service_accounts_kubeconfig_carries_its_own_rights(
    control_plane: ControlPlane, namespace: str
) -> None:
    kubeconfig = control_plane.service_account_kubeconfig(namespace, "default")
    answer = control_plane.kubectl("auth", "whoami", "-o", "json", kubeconfig=kubeconfig)
    assert (
        json.loads(answer)["status"]["userInfo"]["username"] == f"system:serviceaccount:{namespace}:default"
    )
    with pytest.raises(KubectlFailed, match="forbidden"):
        control_plane.kubectl("get", "nodes", kubeconfig=kubeconfig)


def test_a_binding_with_annotations_lands_node_and_annotations_in_one_write(
    control_plane: ControlPlane, namespace: str, node: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods"
    pod = control_plane.request("POST", path, plain_pod("atomic"))
    with watch_one_object(control_plane, path, "atomic", pod["metadata"]["resourceVersion"]) as events:
        control_plane.request(
            "POST",
            f"{path}/atomic/binding",
            {
                "metadata": {
                    "name": "atomic",
                    "uid": pod["metadata"]["uid"],
                    "annotations": {"cpu-map": '{"socket0":["2","3"]}'},
                },
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            },
        )
        # The label is the end mark: whatever the binding wrote comes before it in the same stream.
        control_plane.request(
            "PATCH",
            f"{path}/atomic",
            {"metadata": {"labels": {"seen": "yes"}}},
            content_type=STRATEGIC_MERGE_PATCH,
        )
        before_mark = []
        for event in events:
            if "seen" in event["object"]["metadata"].get("labels", {}):
                break
            before_mark.append(event)

    (bound,) = before_mark
    assert bound["type"] == "MODIFIED"
    assert bound["object"]["spec"]["nodeName"] == node
    assert bound["object"]["metadata"]["annotations"]["cpu-map"] == '{"socket0":["2","3"]}'


def test_no_object_with_a_finalizer_outlives_its_namespace(control_plane: ControlPlane) -> None:
    """Its controller may be slow; to later tests such an object would be unfinished."""
    name = control_plane.create_namespace(f"test-{secrets.token_hex(4)}")
    maps = f"/api/v1/namespaces/{name}/configmaps"
    held = {"metadata": {"name": "held", "finalizers": ["tests.kvplace.io/never"]}}
    control_plane.request("POST", maps, held)
    control_plane.remove_namespace(name)
    assert control_plane.request("GET", maps)["items"] == []


STARTER = """
import os, sys
from harness.control_plane.cluster import ControlPlane
plane = ControlPlane(controller_manager=True)
plane.add_scheduler()
print(plane.folder, *(server.pid for server in plane.servers), flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("kubernetes_programs")  # builds the programs, and skips where that cannot be
def test_nothing_outlives_a_starter_that_is_killed() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    with starter.stdin, starter.stdout:
        folder, *pids = starter.stdout.readline().split()
        servers = [os.pidfd_open(int(pid)) for pid in pids]
        assert len(servers) == 4
        assert Path(folder).is_dir()
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    for server in servers:
        # A pidfd turns readable when its process has ended.
        ended, _, _ = select.select([server], [], [], 60)
        os.close(server)
        assert ended, "a server outlived its starter"
    assert not Path(folder).exists()
