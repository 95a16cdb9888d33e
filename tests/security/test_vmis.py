"""The pods of a VM are placed by the size in its spec, whatever its owner writes beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from harness.control_plane.cluster import MERGE_PATCH, Json, RequestRefused
from tests.security.conftest import PLACEMENT, REQUEST, Tenant, tried

FORGED = {"kvplace.io/vm-size": json.dumps({"vcpus": 1})}
"""The fields that the owner of a VM with four vCPUs would rather be charged for."""
LABEL = {"kvplace.io/opted-in": "true"}


@pytest.fixture(scope="module")
def vmis(tenant: Tenant, kubevirt_crds: dict[str, Json]) -> str:
    """Serve VMIs, which the tenant may edit; returns the path of his."""
    cluster = tenant.cluster
    crd = kubevirt_crds["virtualmachineinstances.kubevirt.io"]
    cluster.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    cluster.wait_for_crds(crd["metadata"]["name"])
    cluster.kubectl(
        *("create", "role", "edits-vmis", "--verb=*", "--resource=virtualmachineinstances.kubevirt.io"),
        f"--namespace={tenant.namespace}",
    )
    cluster.kubectl(
        *("create", "rolebinding", "somebody-edits-vmis", "--role=edits-vmis"),
        *(f"--serviceaccount={tenant.namespace}:somebody", f"--namespace={tenant.namespace}"),
    )
    return f"/apis/kubevirt.io/v1/namespaces/{tenant.namespace}/virtualmachineinstances"


@pytest.fixture
def vmi(tenant: Tenant, vmis: str) -> Iterator[str]:
    """Give the path of a VMI to be made, and remove it."""
    yield f"{vmis}/db"
    tried(lambda: tenant.cluster.request("DELETE", f"{vmis}/db"))


def manifest(annotations: dict[str, str], labels: dict[str, str] | None = None) -> Json:
    domain = {
        "cpu": {"cores": 4},
        "devices": {},
        "resources": {"requests": {"memory": "1Gi"}},
    }
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "db", "annotations": annotations, "labels": labels or {}},
        "spec": {"domain": domain},
    }


def size_of(vmi: Json) -> int | None:
    """Return the vCPUs that count for the pods of a VMI: the size without the label is read by no client."""
    size = vmi["metadata"].get("annotations", {}).get("kvplace.io/vm-size")
    is_trusted = size is not None and "kvplace.io/opted-in" in vmi["metadata"].get("labels", {})
    return int(json.loads(size)["vcpus"]) if is_trusted else None


def test_a_new_vmi_has_the_size_of_its_spec(tenant: Tenant, vmis: str, vmi: str) -> None:
    made = tenant.ask("POST", vmis, manifest({"cpu-set": "any", **FORGED}, LABEL))
    assert size_of(made) == 4


@pytest.mark.parametrize("first", [{"cpu-set": "any"}, {}], ids=["asks", "does not ask"])
@pytest.mark.parametrize(
    "change",
    [
        {"annotations": FORGED},
        {"annotations": FORGED, "labels": LABEL},
        {"annotations": {"cpu-set": "one-numa", **FORGED}, "labels": LABEL},
        {"annotations": {"kvplace.io/vm-size": None}},
    ],
    ids=["size", "size and label", "everything", "no size"],
)
def test_a_changed_vmi_has_the_size_of_its_spec(
    tenant: Tenant, vmis: str, vmi: str, first: dict[str, str], change: Json
) -> None:
    tenant.ask("POST", vmis, manifest(first))
    for step in ({"annotations": change["annotations"]}, change):
        assert size_of(tenant.ask("PATCH", vmi, {"metadata": step}, MERGE_PATCH)) in (4, None)


def test_without_its_label_a_forged_size_is_read_by_no_client(tenant: Tenant, vmis: str, vmi: str) -> None:
    tenant.ask("POST", vmis, manifest({"cpu-set": "any"}))
    step = {"annotations": FORGED, "labels": {"kvplace.io/opted-in": None}}
    assert size_of(tenant.ask("PATCH", vmi, {"metadata": step}, MERGE_PATCH)) in (4, None)
    step = {"labels": LABEL}
    assert size_of(tenant.ask("PATCH", vmi, {"metadata": step}, MERGE_PATCH)) == 4


def test_results_forged_on_a_vmi_are_kept_from_it(tenant: Tenant, vmis: str, vmi: str) -> None:
    forged = {"kvplace.io/placement": PLACEMENT, "kvplace.io/request": REQUEST}
    made = tried(lambda: tenant.ask("POST", vmis, manifest({"cpu-set": "any", **forged})))
    # KubeVirt would copy them to the pod, where admission removes them; most clusters never get that far.
    if not isinstance(made, RequestRefused):
        assert size_of(made) == 4
