"""From a cluster without kvplace to one with half of it: each is named as what it is, with the way on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.kvplace_cluster.installation import MANIFESTS
from harness.waiting import PATIENCE_S
from kvplace.core.errors import ExitCode
from tests.cli.calls import call_process

KINDS = ("nodeledgers.kvplace.io", "nodetopologies.kvplace.io")


@pytest.fixture(scope="module")
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane of this module's own, because others' has kvplace's kinds."""
    assert kubernetes_programs.is_dir()
    with ControlPlane() as running:
        yield running


def findings(plane: ControlPlane, *flags: str) -> dict[str, list[dict[str, Any]]]:
    """Return what doctor finds, by check; the checks that find nothing, too."""
    called = call_process("doctor", "--kubeconfig", str(plane.kubeconfig), "-o", "json", *flags)
    assert called.code in (ExitCode.FAILED, ExitCode.PARTLY_DONE), called.err
    return {one["name"]: one["findings"] for one in json.loads(called.out)["checks"]}


def allow_reading(plane: ControlPlane) -> None:
    """Let `eve` read everything, and write nothing."""
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list"]}]
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    plane.request("POST", f"{rbac}/clusterroles", {"metadata": {"name": "reads"}, "rules": rules})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reads"}
    subjects = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "eve"}]
    body = {"metadata": {"name": "reads"}, "roleRef": role, "subjects": subjects}
    plane.request("POST", f"{rbac}/clusterrolebindings", body)


def as_eve(plane: ControlPlane) -> list[str]:
    return [one["problem"] for one in findings(plane, "--as", "eve")["parts"]]


def test_nothing_half_and_an_overlay_without_certificates_are_distinguished(plane: ControlPlane) -> None:
    absent = findings(plane)
    assert [one["problem"] for one in absent["parts"]] == ["it is not installed in this cluster"]
    assert absent.keys() == {"API server", "parts", "KubeVirt", "kubelets"}

    allow_reading(plane)
    ends = time.monotonic() + PATIENCE_S
    while (problems := as_eve(plane)) and len(problems) == 1 and time.monotonic() < ends:
        pass  # until the API server has seen the binding
    assert problems[0] == "it is not installed in this cluster"
    assert problems[1].startswith("you may not create customresourcedefinitions, clusterroles")

    plane.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "crd"))
    plane.wait_for_crds(*KINDS)
    (half,) = findings(plane)["parts"]
    assert half["problem"] == "only a part is installed (kinds); missing: policies, serve, webhooks"

    plane.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "base"))
    found = findings(plane)
    assert found["parts"] == []
    (secret,) = found["secrets"]
    assert secret["about"] == "Secret kvplace-system/kvplace-serve-tls"
    assert "not on base" in secret["fix"]
    assert all("caBundle has no certificate" in one["problem"] for one in found["webhooks"])
    assert found["policies"] == [], "those of the agent are missed where there is no agent"
