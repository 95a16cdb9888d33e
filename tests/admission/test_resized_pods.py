"""A pod with CPUs of kvplace goes on to request them of its node, whoever may resize pods."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator

import pytest

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, Json, RequestRefused
from tests.admission.reviewed_objects import container, plain_pod
from tests.admission.stored_pods import PODS, create, message, named


def resizing(plane: ControlPlane, path: str, cpu: str, name: str = "c0") -> Callable[[], Json]:
    """Return an attempt to change what one container of a pod requests."""
    kind = "initContainers" if name == "log" else "containers"
    change = {"spec": {kind: [{"name": name, "resources": {"requests": {"cpu": cpu}}}]}}
    return lambda: plane.request(
        "PATCH", f"{path}/resize", change, content_type="application/strategic-merge-patch+json"
    )


@pytest.fixture
def sized(control_plane: ControlPlane, frozen: str) -> Iterator[Callable[..., str]]:
    """Create pods of two CPUs that are placed as given, or wait with that request; answers the path."""
    made = []
    node = {"metadata": {"name": f"resizes-{secrets.token_hex(4)}"}}
    control_plane.request("POST", "/api/v1/nodes", node)
    here = node["metadata"]["name"]
    status = {
        "status": {"allocatable": {"cpu": "8", "memory": "8Gi", "pods": "10"}, "capacity": {"cpu": "8"}}
    }
    control_plane.request("PATCH", f"/api/v1/nodes/{here}/status", status, content_type=MERGE_PATCH)

    def pod_of(policy: str, owned: str | None = None) -> str:
        request = json.dumps({"version": 1, "vcpus": 2, "policy": policy}, separators=(",", ":"))
        log = {"name": "log", "image": "x", "restartPolicy": "Always"}
        pod = plain_pod(
            {"kvplace.io/request": request},
            {"requests": {"cpu": "2"}, "limits": {"cpu": "4"}},
            initContainers=[{**log, "resources": {"requests": {"cpu": "1"}}}],
            schedulerName="nobody",
        )
        pod["metadata"]["labels"] = {"kvplace.io/placed": "true"}
        name = create(control_plane, frozen, named(pod))["metadata"]["name"]
        path = f"{PODS.format(frozen)}/{name}"
        made.append(path)
        if owned is not None:
            placement = json.dumps({"policy": policy, "owned": owned}, separators=(",", ":"))
            binding = {
                "metadata": {"name": name, "annotations": {"kvplace.io/placement": placement}},
                "target": {"kind": "Node", "name": here},
            }
            control_plane.request("POST", f"{path}/binding", binding)
        return path

    yield pod_of
    for path in made:
        control_plane.request("DELETE", f"{path}?gracePeriodSeconds=0")
    control_plane.request("DELETE", f"/api/v1/nodes/{here}")


@pytest.mark.parametrize(
    ("policy", "owned"),
    [
        ("exclusive", "2-3"),
        ("exclusive", None),
        ("share", ""),
        ("share", None),
        ("immovable", ""),
        ("numa", ""),
    ],
)
@pytest.mark.parametrize("name", ["c0", "log"])
def test_no_client_lowers_the_cpu_request_of_a_pod_that_has_cpus(
    control_plane: ControlPlane, sized: Callable[..., str], policy: str, owned: str | None, name: str
) -> None:
    path = sized(policy, owned)
    with pytest.raises(RequestRefused) as refusal:
        resizing(control_plane, path, "1m", name)()
    assert message(refusal.value).endswith(
        "the CPU requests of a pod that has or waits for CPUs of kvplace cannot be lowered; have it run "
        "unpinned first, with kvplace.io/cpu-policy: none"
    )
    raised = resizing(control_plane, path, "3")()
    assert container(raised, "c0")["resources"]["requests"]["cpu"] == "3"


@pytest.mark.parametrize("owned", ["", None])
def test_a_pod_that_runs_unpinned_may_request_less(
    control_plane: ControlPlane, sized: Callable[..., str], owned: str | None
) -> None:
    lowered = resizing(control_plane, sized("none", owned), "1m")()
    assert container(lowered, "c0")["resources"]["requests"]["cpu"] == "1m"
