"""A tenant with `edit` in his namespace changes no result, and reaches nothing of kvplace and of others.

The proof of "no core" is the node itself: after an attempt a pod that requests all of its CPUs gets them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.control_plane.cluster import ControlPlane, Json, RequestRefused
from harness.control_plane.watching import wait_for
from tests.security.conftest import (
    CPUS,
    LABEL,
    NODE,
    PLACEMENT,
    REQUEST,
    RESULTS,
    Tenant,
    everything_is_free,
    pod,
    tried,
    wait_for_no_owners,
)

CHANGES: dict[str, tuple[Json, str]] = {
    "the placement": (
        {"metadata": {"annotations": {"kvplace.io/placement": PLACEMENT}}},
        "results of kvplace",
    ),
    "no placement": ({"metadata": {"annotations": {"kvplace.io/placement": None}}}, "results of kvplace"),
    "the request": ({"metadata": {"annotations": {"kvplace.io/request": REQUEST}}}, "results of kvplace"),
    "the cpu-map": ({"metadata": {"annotations": {"cpu-map": "{}"}}}, "result of kvplace"),
    "no label": ({"metadata": {"labels": {"kvplace.io/placed": None}}}, "set by kvplace"),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_the_results_of_his_own_pod_stay_as_they_are(tenant: Tenant, placed: Json, changed: str) -> None:
    change, sentence = CHANGES[changed]
    with pytest.raises(RequestRefused, match=sentence):
        tenant.patch_pod("placed", change)
    whole: Any = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "placed", **change["metadata"]}}
    if None not in next(iter(change["metadata"].values())).values():
        with pytest.raises(RequestRefused, match=sentence):
            tenant.ask(
                "PATCH",
                f"{tenant.pods}/placed?fieldManager=somebody&force=true",
                whole,
                "application/apply-patch+yaml",
            )


def test_a_running_pod_of_his_gets_no_label_and_so_no_results(tenant: Tenant, name: str) -> None:
    tenant.create_pod(name)
    with pytest.raises(RequestRefused, match="kvplace and cannot be changed"):
        tenant.patch_pod(name, {"metadata": {"labels": LABEL, "annotations": RESULTS}})
    # Without the label they are words: nothing reads them.
    tenant.patch_pod(name, {"metadata": {"annotations": RESULTS}})
    everything_is_free(tenant.cluster, tenant)


NOT_HIS: dict[str, tuple[str, str, Json | None]] = {
    "bind": ("POST", "{pods}/placed/binding", {"target": {"kind": "Node", "name": NODE}}),
    "status": ("PATCH", "{pods}/placed/status", {"metadata": {"annotations": RESULTS}}),
    "nominate": ("PATCH", "{pods}/placed/status", {"status": {"nominatedNodeName": NODE}}),
    "read a ledger": ("GET", "/apis/kvplace.io/v1alpha1/nodeledgers/worker", None),
    "list ledgers": ("GET", "/apis/kvplace.io/v1alpha1/nodeledgers", None),
    "write a ledger": (
        "PATCH",
        "/apis/kvplace.io/v1alpha1/nodeledgers/worker",
        {"spec": {"owners": {"2": "me"}}},
    ),
    "delete a ledger": ("DELETE", "/apis/kvplace.io/v1alpha1/nodeledgers/worker", None),
    "make a ledger": ("POST", "/apis/kvplace.io/v1alpha1/nodeledgers", {"metadata": {"name": "other"}}),
    "describe a node": ("POST", "/apis/kvplace.io/v1alpha1/nodetopologies", {"metadata": {"name": NODE}}),
    "read topologies": ("GET", "/apis/kvplace.io/v1alpha1/nodetopologies", None),
    "annotate a node": ("PATCH", "/api/v1/nodes/worker", {"metadata": {"annotations": {"cpu-map": "{}"}}}),
    "read the pods of all": ("GET", "/api/v1/pods", None),
    "read the VMIs of all": ("GET", "/apis/kubevirt.io/v1/virtualmachineinstances", None),
    "read the events of all": ("GET", "/apis/events.k8s.io/v1/events", None),
    "read other pods": ("GET", "/api/v1/namespaces/kvplace-system/pods", None),
    "read certificates": ("GET", "/api/v1/namespaces/kvplace-system/secrets", None),
    "be kvplace": ("POST", "/api/v1/namespaces/kvplace-system/serviceaccounts/kvplace-serve/token", {}),
}


@pytest.mark.parametrize("what", NOT_HIS)
def test_objects_of_others_are_forbidden(tenant: Tenant, placed: Json, what: str) -> None:
    method, path, body = NOT_HIS[what]
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    with pytest.raises(RequestRefused) as refused:
        tenant.ask(method, path.format(pods=tenant.pods), body, kind)
    assert refused.value.status == 403


def test_no_client_creates_a_pod_with_a_status(tenant: Tenant, name: str) -> None:
    made = tenant.ask("POST", tenant.pods, pod(name) | {"status": {"nominatedNodeName": NODE}})
    assert "nominatedNodeName" not in made["status"]


def test_an_ephemeral_container_changes_no_results(tenant: Tenant, placed: Json) -> None:
    container = {"name": "debug", "image": "work.test/work"}
    change = {"spec": {"ephemeralContainers": [container]}, "metadata": {"annotations": RESULTS}}
    after = tried(
        lambda: tenant.ask(
            "PATCH",
            f"{tenant.pods}/placed/ephemeralcontainers",
            change,
            "application/strategic-merge-patch+json",
        )
    )
    if isinstance(after, RequestRefused):
        assert after.status == 403
    else:
        assert after["metadata"]["annotations"] == placed["metadata"]["annotations"]


def test_a_refused_pod_with_a_strange_name_is_named_in_the_events_as_it_is(
    cluster: ControlPlane, tenant: Tenant
) -> None:
    strange = "a." * 120 + "b"
    tenant.ask("POST", tenant.pods, pod(strange, {"annotations": {"cpu-set": "one-socket"}}, cpus="9"))
    waiting = wait_for(
        cluster,
        tenant.pods,
        strange,
        lambda found: any("CPUs" in one.get("message", "") for one in found["status"].get("conditions", ())),
    )
    tenant.delete_pod(strange)
    assert not waiting["spec"].get("nodeName")


@pytest.fixture
def rival(cluster: ControlPlane, tenant: Tenant) -> Iterator[Json]:
    """Give a pod of another namespace that has all CPUs of the node.

    A test names it before `name`: a pod of the tenant that waits gets these CPUs once they are released.
    """
    others = cluster.create_namespace("neighbours")
    pods = f"/api/v1/namespaces/{others}/pods"
    cluster.request("POST", pods, pod("rival", {"annotations": {"cpu-set": "one-socket"}}, cpus=str(CPUS)))
    yield wait_for(cluster, pods, "rival", lambda found: bool(found["spec"].get("nodeName")))
    cluster.remove_namespace(others)
    wait_for_no_owners(cluster)


def test_a_refusal_does_not_name_the_owner_of_the_cores(
    cluster: ControlPlane, tenant: Tenant, rival: Json, name: str
) -> None:
    tenant.create_pod(name, {"annotations": {"cpu-set": "one-socket", "kvplace.io/explain": "true"}})
    wait_for(
        cluster,
        tenant.pods,
        name,
        lambda found: any("CPUs" in one.get("message", "") for one in found["status"].get("conditions", ())),
    )
    events = tenant.ask("GET", tenant.pods.replace("/pods", "/events"))
    told = json.dumps([tenant.ask("GET", f"{tenant.pods}/{name}"), events])
    of_the_rival = [rival["metadata"][key] for key in ("name", "namespace", "uid")]
    assert not [word for word in of_the_rival if word in told]
