"""The API server refuses writes of kvplace's own service account, and of all others in kvplace's name."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from harness.control_plane.cluster import (
    MERGE_PATCH,
    ControlPlane,
    Json,
    RequestRefused,
)
from tests.manifests.policies import granted, refused

LEDGERS = "/apis/kvplace.io/v1alpha1/nodeledgers"
RELEASED_AT = "kvplace.io/released-at"
ONLY_THE_ANNOTATION = "kvplace-serve may change only the annotation kvplace.io/released-at of a node"


@pytest.fixture(scope="module")
def serve(cluster: ControlPlane) -> str:
    """Give the token of kvplace serve's own service account."""
    return cluster.service_account_token("kvplace-system", "kvplace-serve")


@pytest.fixture
def node(cluster: ControlPlane) -> Iterator[str]:
    name = f"worker-{secrets.token_hex(4)}"
    cluster.request(
        "POST",
        "/api/v1/nodes",
        {"metadata": {"name": name, "labels": {"rack": "a"}, "annotations": {"cpu-map": "{}"}}},
    )
    yield f"/api/v1/nodes/{name}"
    cluster.request("DELETE", f"/api/v1/nodes/{name}")


@pytest.fixture
def guarded_node(cluster: ControlPlane, serve: str, node: str) -> str:
    """Give a node once the policy that guards nodes is in effect."""
    change = {"metadata": {"labels": {"rack": "b"}}}
    refused(
        lambda: cluster.request("PATCH", f"{node}?dryRun=All", change, content_type=MERGE_PATCH, token=serve)
    )
    return node


def test_serve_may_set_the_released_at_annotation_of_a_node(
    cluster: ControlPlane, serve: str, guarded_node: str
) -> None:
    for time in ("2026-11-21T10:00:00Z", "2026-11-21T10:00:01.5+00:00", None):
        change = {"metadata": {"annotations": {RELEASED_AT: time}}}
        after = cluster.request("PATCH", guarded_node, change, content_type=MERGE_PATCH, token=serve)
        assert after["metadata"]["annotations"].get(RELEASED_AT) == time
        assert after["metadata"]["annotations"]["cpu-map"] == "{}"


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"labels": {"rack": "b"}}},
        {"metadata": {"labels": {"rack": None}}},
        {"metadata": {"labels": {"new": "yes"}}},
        {"metadata": {"annotations": {"cpu-map": "[]"}}},
        {"metadata": {"annotations": {"cpu-map": None}}},
        {"metadata": {"annotations": {"new": "yes"}}},
        {"metadata": {"annotations": {RELEASED_AT: "now", "new": "yes"}}},
        {"metadata": {"annotations": None}},
        {"metadata": {"finalizers": ["example.test/stay"]}},
        {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "b"}]}},
        {"spec": {"unschedulable": True}},
        {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}},
        {"spec": {"podCIDR": "10.1.0.0/24"}},
    ],
    ids=str,
)
def test_serve_may_change_nothing_else_of_a_node(
    cluster: ControlPlane, serve: str, guarded_node: str, change: Json
) -> None:
    with pytest.raises(RequestRefused, match=ONLY_THE_ANNOTATION) as refusal:
        cluster.request("PATCH", guarded_node, change, content_type=MERGE_PATCH, token=serve)
    assert refusal.value.status == 403
    kept = cluster.request("GET", guarded_node)
    assert kept["metadata"]["labels"] == {"rack": "a"}
    assert kept["metadata"]["annotations"]["cpu-map"] == "{}"
    assert not {"unschedulable", "taints", "podCIDR"} & kept["spec"].keys()


def test_the_released_at_annotation_is_limited_in_length(
    cluster: ControlPlane, serve: str, guarded_node: str
) -> None:
    change = {"metadata": {"annotations": {RELEASED_AT: "x" * 65}}}
    with pytest.raises(RequestRefused, match="at most 64 characters"):
        cluster.request("PATCH", guarded_node, change, content_type=MERGE_PATCH, token=serve)


def test_the_policy_does_not_limit_other_clients_changes_of_a_node(
    cluster: ControlPlane, guarded_node: str
) -> None:
    change = {"metadata": {"labels": {"rack": "b"}}, "spec": {"unschedulable": True}}
    after = cluster.request("PATCH", guarded_node, change, content_type=MERGE_PATCH)
    assert after["spec"]["unschedulable"] is True


@pytest.fixture(scope="module")
def pod(cluster: ControlPlane) -> tuple[str, str]:
    """Give the path and UID of a pod, unbound, once the policy that guards bindings is in effect."""
    namespace = cluster.create_namespace(f"test-{secrets.token_hex(4)}")
    path = f"/api/v1/namespaces/{namespace}/pods"
    made = cluster.request(
        "POST",
        path,
        {"metadata": {"name": "vm"}, "spec": {"containers": [{"name": "a", "image": "example.test/a"}]}},
    )
    uid = made["metadata"]["uid"]
    forged = {"kvplace.io/placement": "{}"}
    refused(lambda: _bind(cluster, f"{path}/vm", forged, uid=uid, token=None, dry_run=True))
    return f"{path}/vm", uid


def test_no_other_client_can_bring_a_placement_into_a_pod(
    cluster: ControlPlane, pod: tuple[str, str]
) -> None:
    path, uid = pod
    scheduler = cluster.service_account_token("kvplace-system", "kvplace-scheduler")
    for token in (None, scheduler):
        with pytest.raises(RequestRefused, match="only kvplace-serve may write"):
            _bind(cluster, path, {"kvplace.io/placement": uid}, uid=uid, token=token, dry_run=True)


def test_another_scheduler_may_still_bind_and_bring_a_cpu_map(
    cluster: ControlPlane, pod: tuple[str, str]
) -> None:
    path, uid = pod
    _bind(cluster, path, {"cpu-map": '{"socket0":["1"]}'}, uid=uid, token=None, dry_run=True)
    _bind(cluster, path, {}, uid=uid, token=None, dry_run=True)


@pytest.mark.parametrize("annotations", [{}, {"kvplace.io/placement": '{"podUid":"another"}'}], ids=str)
def test_serve_cannot_bind_a_pod_without_a_placement_for_it(
    cluster: ControlPlane, serve: str, pod: tuple[str, str], annotations: dict[str, str]
) -> None:
    path, uid = pod
    with pytest.raises(RequestRefused, match="for that UID"):
        _bind(cluster, path, annotations, uid=uid, token=serve, dry_run=True)


def test_serve_cannot_bind_a_pod_without_its_uid(
    cluster: ControlPlane, serve: str, pod: tuple[str, str]
) -> None:
    path, uid = pod
    with pytest.raises(RequestRefused, match="only by its UID"):
        _bind(cluster, path, {"kvplace.io/placement": uid}, uid=None, token=serve, dry_run=True)


def test_serve_binds_a_pod_with_its_placement(
    cluster: ControlPlane, serve: str, pod: tuple[str, str]
) -> None:
    path, uid = pod
    placement = f'{{"version":1,"podUid":"{uid}"}}'
    _bind(cluster, path, {"kvplace.io/placement": placement, "cpu-map": "{}"}, uid=uid, token=serve)
    bound = cluster.request("GET", path)
    assert bound["spec"]["nodeName"] == "worker"
    assert bound["metadata"]["annotations"]["kvplace.io/placement"] == placement


def _bind(
    cluster: ControlPlane,
    path: str,
    annotations: dict[str, str],
    *,
    uid: str | None,
    token: str | None,
    dry_run: bool = False,
) -> Json:
    metadata: Json = {"name": "vm", "annotations": annotations}
    if uid is not None:
        metadata["uid"] = uid
    return cluster.request(
        "POST",
        f"{path}/binding{'?dryRun=All' if dry_run else ''}",
        {"metadata": metadata, "target": {"apiVersion": "v1", "kind": "Node", "name": "worker"}},
        token=token,
    )


def test_a_ledger_with_owners_cannot_be_deleted_by_any_client(cluster: ControlPlane, serve: str) -> None:
    ledgers = "/apis/kvplace.io/v1alpha1/nodeledgers"
    claim = {
        "namespace": "a",
        "pod": "b",
        "policy": "exclusive",
        "cpus": "1",
        "owned": "1",
    }
    cluster.request(
        "POST",
        ledgers,
        {
            "apiVersion": "kvplace.io/v1alpha1",
            "kind": "NodeLedger",
            "metadata": {"name": "worker"},
            "spec": {"owners": {"1": "uid"}, "claims": {"uid": claim}},
        },
        token=serve,
    )
    path = f"{ledgers}/worker"
    refusal = refused(lambda: cluster.request("DELETE", f"{path}?dryRun=All", token=serve))
    assert "the ledger still has owners" in str(refusal)
    with pytest.raises(RequestRefused, match="the ledger still has owners"):
        cluster.request("DELETE", path)

    released = {"spec": {"owners": {"1": None}, "claims": {"uid": None}}}
    cluster.request("PATCH", path, released, content_type=MERGE_PATCH, token=serve)
    cluster.request("DELETE", path, token=serve)


def a_ledger(cluster: ControlPlane, name: str, *finalizers: str) -> str:
    """Create a ledger without owners; return its path."""
    metadata = {"name": name, "finalizers": list(finalizers)}
    spec: Json = {"owners": {}, "claims": {}}
    body = {"apiVersion": "kvplace.io/v1alpha1", "kind": "NodeLedger", "metadata": metadata, "spec": spec}
    cluster.request("POST", LEDGERS, body)
    return f"{LEDGERS}/{name}"


def owning(cpu: str, uid: str) -> Json:
    claim = {"namespace": "a", "pod": "b", "policy": "exclusive", "cpus": cpu, "owned": cpu}
    return {"spec": {"owners": {cpu: uid}, "claims": {uid: claim}}}


@pytest.mark.parametrize(
    "policy", ["", "?propagationPolicy=Foreground"], ids=["by a finalizer", "foreground"]
)
def test_a_ledger_that_is_being_deleted_gives_no_cpu_away(
    cluster: ControlPlane, serve: str, policy: str
) -> None:
    """Else it could vanish with an owner, whose CPUs would get a second one in the ledger that follows."""
    path = a_ledger(cluster, f"ending-{secrets.token_hex(4)}", "test.example/wait")
    cluster.request("DELETE", f"{path}{policy}", token=serve)
    dry = f"{path}?dryRun=All"
    refusal = refused(
        lambda: cluster.request("PATCH", dry, owning("1", "uid"), content_type=MERGE_PATCH, token=serve)
    )
    assert "the ledger is being deleted; a CPU can get an owner when" in str(refusal)
    cluster.request("PATCH", path, {"metadata": {"finalizers": None}}, content_type=MERGE_PATCH)


def test_a_ledger_with_owners_that_is_being_deleted_keeps_its_finalizers_until_they_are_released(
    cluster: ControlPlane, serve: str
) -> None:
    path = a_ledger(cluster, "owned", "test.example/wait")
    cluster.request("PATCH", path, owning("1", "uid"), content_type=MERGE_PATCH, token=serve)
    binding = (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/ledger-deletion.kvplace.io"
    )

    def acts(how: str) -> None:
        change = {"spec": {"validationActions": [how]}}
        cluster.request("PATCH", binding, change, content_type=MERGE_PATCH)

    acts("Audit")  # else it could not be deleted at all
    try:
        granted(lambda: cluster.request("DELETE", path))
    finally:
        acts("Deny")
    unfinal = {"metadata": {"finalizers": None}}
    refusal = refused(
        lambda: cluster.request("PATCH", f"{path}?dryRun=All", unfinal, content_type=MERGE_PATCH)
    )
    assert "release their CPUs before removing a finalizer" in str(refusal)
    released = {"spec": {"owners": {"1": None}, "claims": {"uid": None}}}
    cluster.request("PATCH", path, released, content_type=MERGE_PATCH, token=serve)
    cluster.request("PATCH", path, unfinal, content_type=MERGE_PATCH)
    with pytest.raises(RequestRefused) as gone:
        cluster.request("GET", path)
    assert gone.value.status == 404


@pytest.fixture
def placed_pod(cluster: ControlPlane, serve: str) -> tuple[str, str]:
    """Give the path and UID of a pod that serve has bound with a placement."""
    namespace = cluster.create_namespace(f"test-{secrets.token_hex(4)}")
    path = f"/api/v1/namespaces/{namespace}/pods"
    made = cluster.request(
        "POST",
        path,
        {
            "metadata": {"name": "vm", "labels": {"kvplace.io/placed": "true"}},
            "spec": {"containers": [{"name": "a", "image": "example.test/a"}]},
        },
    )
    uid = made["metadata"]["uid"]
    results = {"kvplace.io/placement": _placement(uid), "cpu-map": '{"socket0":["1"]}'}
    _bind(cluster, f"{path}/vm", results, uid=uid, token=serve)
    dry_run = f"{path}/vm?dryRun=All"
    change = {"metadata": {"annotations": {"new": "yes"}}}
    refused(lambda: cluster.request("PATCH", dry_run, change, content_type=MERGE_PATCH, token=serve))
    return f"{path}/vm", uid


def _placement(uid: str, revision: int = 1, node: str = "worker") -> str:
    number = f',"revision":{revision}' if revision > 1 else ""
    return f'{{"version":1,"podUid":"{uid}","node":"{node}"{number}}}'


def _relocate(cluster: ControlPlane, path: str, placement: str, token: str | None) -> Json:
    annotations = {"kvplace.io/placement": placement, "cpu-map": '{"socket0":["2"]}'}
    return cluster.request(
        "PATCH", path, {"metadata": {"annotations": annotations}}, content_type=MERGE_PATCH, token=token
    )


def test_serve_writes_one_revision_after_the_other(
    cluster: ControlPlane, serve: str, placed_pod: tuple[str, str]
) -> None:
    path, uid = placed_pod
    for revision in (2, 3):
        after = _relocate(cluster, path, _placement(uid, revision), serve)
        assert after["metadata"]["annotations"]["cpu-map"] == '{"socket0":["2"]}'
        again = _relocate(cluster, path, _placement(uid, revision), serve)
        assert again["metadata"]["annotations"] == after["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("revision", "node", "same_pod"),
    [(1, "other", True), (3, "worker", True), (2, "other", True), (2, "worker", False)],
)
def test_serve_writes_no_other_revision_and_none_for_another_pod_or_node(
    cluster: ControlPlane, serve: str, placed_pod: tuple[str, str], revision: int, node: str, same_pod: bool
) -> None:
    path, uid = placed_pod
    with pytest.raises(RequestRefused, match="results of kvplace") as refusal:
        _relocate(cluster, path, _placement(uid if same_pod else "another", revision, node), serve)
    assert refusal.value.status == 422


def test_no_other_client_writes_a_revision(cluster: ControlPlane, placed_pod: tuple[str, str]) -> None:
    path, uid = placed_pod
    with pytest.raises(RequestRefused, match="results of kvplace"):
        _relocate(cluster, path, _placement(uid, 2), None)


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"annotations": {"new": "yes"}}},
        {"metadata": {"labels": {"new": "yes"}}},
        {"metadata": {"finalizers": ["example.test/stay"]}},
        {"spec": {"activeDeadlineSeconds": 1}},
    ],
    ids=str,
)
def test_serve_may_change_nothing_else_of_a_pod(
    cluster: ControlPlane, serve: str, placed_pod: tuple[str, str], change: Json
) -> None:
    with pytest.raises(RequestRefused, match="may change only the placement"):
        cluster.request("PATCH", placed_pod[0], change, content_type=MERGE_PATCH, token=serve)


@pytest.mark.parametrize("subresource", ["", "/status"])
@pytest.mark.parametrize("label", ["", "kvplace.io/placed"])
def test_serve_leaves_pods_without_the_label_alone_and_labels_none(
    cluster: ControlPlane, serve: str, placed_pod: tuple[str, str], subresource: str, label: str
) -> None:
    refused(lambda: _annotate(cluster, f"{placed_pod[0]}?dryRun=All", {"new": "yes"}, serve))
    pod = _waiting_pod(cluster, "plain-", {})
    change: Json = {"labels": {label: "true"}} if label else {"annotations": {"cpu-map": "{}"}}
    path = f"{pod}{subresource}"
    with pytest.raises(RequestRefused, match=r"only pods with the label|set by kvplace") as refusal:
        cluster.request("PATCH", path, {"metadata": change}, content_type=MERGE_PATCH, token=serve)
    assert refusal.value.status in (403, 422)


def _annotate(cluster: ControlPlane, path: str, annotations: Json, token: str) -> Json:
    change = {"metadata": {"annotations": annotations}}
    return cluster.request("PATCH", path, change, content_type=MERGE_PATCH, token=token)


def _condition(kind: str) -> Json:
    return {"type": kind, "status": "False", "reason": "NotRelocated", "message": "no room"}


def test_of_a_pods_status_serve_may_set_its_own_condition_alone(
    cluster: ControlPlane, serve: str, placed_pod: tuple[str, str]
) -> None:
    path = f"{placed_pod[0]}/status"
    strategic = "application/strategic-merge-patch+json"
    own = {"status": {"conditions": [_condition("kvplace.io/Relocated")]}}
    after = cluster.request("PATCH", path, own, content_type=strategic, token=serve)
    assert "kvplace.io/Relocated" in [one["type"] for one in after["status"]["conditions"]]
    changes: list[Json] = [
        {"status": {"conditions": [_condition("kvplace.io/Pinned")]}},
        {"status": {"conditions": [_condition("Ready")]}},
        {"status": {"phase": "Failed"}},
        {"status": {"podIP": "10.0.0.1"}},
        {"status": {"message": "m"}},
        {"status": {"observedGeneration": 99}},
        {"status": {"reason": None}},
    ]
    stored = cluster.request("GET", placed_pod[0])["status"]
    reported = {"status": {"reason": stored.get("reason", "Reported")}}
    cluster.request("PATCH", path, reported, content_type=strategic)
    for change in changes:
        with pytest.raises(RequestRefused, match=r"only the condition kvplace.io/Relocated"):
            cluster.request("PATCH", path, change, content_type=strategic, token=serve)


def _waiting_pod(cluster: ControlPlane, name: str, labels: Json) -> str:
    """Create a pod that has no node and return its path."""
    path = "/api/v1/namespaces/default/pods"
    made = cluster.request(
        "POST",
        path,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": name, "labels": labels},
            "spec": {
                "schedulerName": "nobody",
                "automountServiceAccountToken": False,
                "containers": [{"name": "main", "image": "example.test/a"}],
            },
        },
    )
    return f"{path}/{made['metadata']['name']}"


def _nominate(cluster: ControlPlane, pod: str, node: str | None, token: str | None, **status: Any) -> Json:
    change = {"status": {"nominatedNodeName": node, **status}}
    return cluster.request("PATCH", f"{pod}/status", change, content_type=MERGE_PATCH, token=token)


def test_serve_may_nominate_a_node_once_for_a_pod_that_waits_for_cores(
    cluster: ControlPlane, serve: str
) -> None:
    pod = _waiting_pod(cluster, "waits-", {"kvplace.io/placed": "true"})
    assert _nominate(cluster, pod, "worker", serve)["status"]["nominatedNodeName"] == "worker"
    for node in ("another", None):
        with pytest.raises(RequestRefused, match="nominate a node for one without"):
            _nominate(cluster, pod, node, serve)


@pytest.mark.parametrize("case", ["a waiting pod of another client", "a bound pod"])
def test_serve_nominates_no_node_for_a_pod(
    cluster: ControlPlane, serve: str, placed_pod: tuple[str, str], case: str
) -> None:
    waiting = _waiting_pod(cluster, "waits-", {})
    pod = placed_pod[0] if case == "a bound pod" else waiting
    with pytest.raises(RequestRefused):
        _nominate(cluster, pod, "worker", serve)
    assert "nominatedNodeName" not in cluster.request("GET", pod)["status"]


@pytest.mark.parametrize(
    "more",
    [
        {"status": {"message": "m"}},
        {"status": {"reason": None}},
        {"status": {"phase": "Failed"}},
        {"status": {"hostIP": "10.0.0.1"}},
        {"status": {"podIPs": [{"ip": "10.0.0.1"}]}},
        {"status": {"startTime": "2026-01-01T00:00:00Z"}},
        {"status": {"conditions": None}},
        {"status": {"conditions": [_condition("Ready")]}},
        {"metadata": {"labels": {"new": "label"}}},
        {"metadata": {"annotations": {"new": "annotation"}}},
        {"metadata": {"finalizers": ["new.test/finalizer"]}},
    ],
    ids=str,
)
def test_serve_changes_nothing_else_of_a_pod_for_which_it_nominates_a_node(
    cluster: ControlPlane, serve: str, more: Json
) -> None:
    pod = _waiting_pod(cluster, "waits-", {"kvplace.io/placed": "true"})
    reported = {"conditions": [_condition("PodScheduled")], "reason": "Waits"}
    cluster.request("PATCH", f"{pod}/status", {"status": reported}, content_type=MERGE_PATCH)
    change = {"metadata": more.get("metadata", {})}
    change["status"] = {"nominatedNodeName": "worker", **more.get("status", {})}
    with pytest.raises(RequestRefused) as refusal:
        cluster.request("PATCH", f"{pod}/status", change, content_type=MERGE_PATCH, token=serve)
    assert refusal.value.status == 403
    assert "nominatedNodeName" not in cluster.request("GET", pod)["status"]
    assert _nominate(cluster, pod, "worker", serve)["status"]["reason"] == "Waits"
