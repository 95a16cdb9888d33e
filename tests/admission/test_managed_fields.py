"""The API server records no writer of the fields of a VMI and of its pod, unless a user has applied them."""

from __future__ import annotations

from typing import Any

import pytest

from harness.control_plane.cluster import MERGE_PATCH, SERVER_SIDE_APPLY, ControlPlane
from kvplace.admission.vmi import admit_vmi
from tests.admission.conftest import Admission
from tests.admission.pod_admission import admit, launcher
from tests.admission.reviewed_objects import SETTINGS, Json, plain_pod, vmi, vmi_of

BY_CONTROLLER = {"manager": "virt-controller", "operation": "Update", "fieldsV1": {"f:spec": {}}}
APPLIED = {"manager": "argocd", "operation": "Apply", "fieldsV1": {"f:spec": {}}}
BY_KUBECTL_APPLY = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}


def admitted_vmi(entries: Any, annotations: dict[str, str] | None = None) -> Json:
    asking = vmi({"cpu-set": "one-numa", **(annotations or {})})
    asking["metadata"]["managedFields"] = entries
    admitted = admit_vmi(asking, namespace="default", settings=SETTINGS)
    return dict(admitted.object["metadata"])


def test_a_vmi_that_no_client_applied_loses_the_record() -> None:
    assert "managedFields" not in admitted_vmi([BY_CONTROLLER])


@pytest.mark.parametrize("entries", [[APPLIED], [BY_CONTROLLER, APPLIED]])
def test_a_vmi_that_was_applied_keeps_the_record(entries: list[Json]) -> None:
    assert admitted_vmi(entries)["managedFields"] == entries


def test_a_vmi_that_kubectl_applied_on_its_side_keeps_the_record() -> None:
    assert admitted_vmi([BY_CONTROLLER], BY_KUBECTL_APPLY)["managedFields"] == [BY_CONTROLLER]


@pytest.mark.parametrize("entries", [None, "", {}, ["x"], [{}]])
def test_a_record_that_is_none_stays(entries: Any) -> None:
    assert admitted_vmi(entries)["managedFields"] == entries


def test_the_pod_of_a_vm_loses_the_record() -> None:
    pod = launcher()
    pod["metadata"]["managedFields"] = [BY_CONTROLLER]
    after, _ = admit(pod, vmi_of(pod))
    assert "managedFields" not in after["metadata"]


def test_behind_an_api_server_a_pod_is_recorded_again_when_a_user_applies_it(
    control_plane: ControlPlane, admission: Admission
) -> None:
    _, namespace = admission
    created = control_plane.request("POST", f"/api/v1/namespaces/{namespace}/pods", plain_pod())
    path = f"/api/v1/namespaces/{namespace}/pods/solver"
    status = {"status": {"message": "seen"}}
    patched = control_plane.request("PATCH", f"{path}/status", status, content_type=MERGE_PATCH)
    assert "managedFields" not in {**created["metadata"], **patched["metadata"]}
    labelled = {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": {"seen": "yes"}}}
    assert writers_after(control_plane, path, labelled) == {"somebody", "before-first-apply"}


def test_behind_an_api_server_a_pod_that_was_applied_stays_recorded(
    control_plane: ControlPlane, admission: Admission
) -> None:
    _, namespace = admission
    pod = plain_pod()
    pod["metadata"]["name"] = "applied"
    assert writers_after(control_plane, f"/api/v1/namespaces/{namespace}/pods/applied", pod) == {"somebody"}


def writers_after(plane: ControlPlane, path: str, pod: Json) -> set[str]:
    """Apply a pod and return who is recorded then."""
    applied = plane.request("PATCH", f"{path}?fieldManager=somebody", pod, content_type=SERVER_SIDE_APPLY)
    return {entry["manager"] for entry in applied["metadata"]["managedFields"]}
