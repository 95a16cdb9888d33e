"""Every right of kvplace's service accounts is used, and every right that is used is granted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane, Json
from harness.control_plane.watching import watch_one_object
from tests.manifests.conftest import MANIFESTS
from tests.manifests.recorded_rights import Right, methods_in_use, port_methods, rights_in_use


def rights(group: str, resource: str, verbs: str, *, name: str = "") -> set[Right]:
    return {(group, resource, name, verb) for verb in verbs.split()}


VIEW = {
    right
    for resource in ("nodetopologies", "nodetopologies/status", "nodeledgers")
    for right in rights("kvplace.io", resource, "get list watch")
}

CHECKED_WITH_THE_ALLOCATION = rights("resource.k8s.io", "resourceclaims/binding", "patch")
"""A right that the API server checks beside the right of the request; test_dra_driver_cpu.py needs it."""


def granted(cluster: ControlPlane, namespace: str, token: str) -> set[Right]:
    """List what the holder of a token may do in a namespace, by the API server's own answer."""
    answer = cluster.request(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        },
        token=token,
    )
    assert answer["status"]["incomplete"] is False
    return {right for rule in answer["status"]["resourceRules"] for right in _rights_of(rule)}


def _rights_of(rule: Json) -> set[Right]:
    return {
        (group, resource, name, verb)
        for group in rule.get("apiGroups", [""])
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }


def _all_rights(role: Json) -> set[Right]:
    return {right for rule in role["rules"] or [] for right in _rights_of(rule)}


@pytest.fixture(scope="module")
def everybodys(cluster: ControlPlane) -> set[Right]:
    """Give the rights of a service account without any."""
    namespace = cluster.create_namespace("without-rights")
    return granted(cluster, namespace, cluster.service_account_token(namespace, "default"))


async def test_serve_is_granted_exactly_the_rights_that_it_uses(tmp_path: Path) -> None:
    of_choice = _granted_by("dra-driver-cpu/rbac.yaml") - CHECKED_WITH_THE_ALLOCATION
    assert _granted_by("rbac/serve.yaml") | of_choice == await rights_in_use(tmp_path, "serve")


async def test_a_component_grants_exactly_the_rights_that_serve_uses_for_migrations(tmp_path: Path) -> None:
    assert _granted_by("moves-between-nodes/rbac.yaml") == await rights_in_use(tmp_path, "migrations")


async def test_the_agent_is_granted_exactly_the_rights_that_it_uses(tmp_path: Path) -> None:
    assert _granted_by("agent/rbac.yaml") == await rights_in_use(tmp_path, "agent")


def _granted_by(file: str) -> set[Right]:
    documents = yaml.safe_load_all((MANIFESTS / file).read_text())
    (role,) = [found for found in documents if found["kind"] == "ClusterRole"]
    return _all_rights(role)


def test_every_call_of_the_port_to_the_api_server_is_made_somewhere() -> None:
    assert methods_in_use("serve") | methods_in_use("agent") == port_methods()


@pytest.mark.parametrize("namespace", ["kvplace-system", "kvplace-agent", "kube-system", "default"])
@pytest.mark.parametrize("process", ["serve", "agent"])
async def test_the_api_server_grants_exactly_these_rights(
    cluster: ControlPlane, everybodys: set[Right], namespace: str, process: str, tmp_path: Path
) -> None:
    home = {"serve": "kvplace-system", "agent": "kvplace-agent"}[process]
    token = cluster.service_account_token(home, f"kvplace-{process}")
    of_choice = _granted_by("dra-driver-cpu/rbac.yaml")
    used = await rights_in_use(tmp_path, process) - of_choice
    assert granted(cluster, namespace, token) - everybodys == used


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("get", "secrets"),
        ("list", "secrets"),
        ("get", "configmaps"),
        ("create", "pods"),
        ("update", "pods"),
        ("delete", "pods"),
        ("create", "pods/exec"),
        ("create", "pods/eviction"),
        ("get", "nodes"),
        ("update", "nodes"),
        ("delete", "nodes"),
        ("patch", "nodes/status"),
        ("patch", "resourceclaims.resource.k8s.io"),
        ("create", "nodes/proxy"),
        ("deletecollection", "nodeledgers.kvplace.io"),
        ("patch", "nodetopologies.kvplace.io"),
        ("patch", "virtualmachineinstances.kubevirt.io"),
        ("list", "virtualmachineinstancemigrations.kubevirt.io"),
        ("create", "virtualmachineinstancemigrations.kubevirt.io"),
        ("delete", "virtualmachineinstancemigrations.kubevirt.io"),
        ("create", "serviceaccounts/token"),
        ("impersonate", "users"),
        ("escalate", "clusterroles.rbac.authorization.k8s.io"),
        ("create", "leases.coordination.k8s.io"),
        ("patch", "mutatingwebhookconfigurations.admissionregistration.k8s.io"),
    ],
)
def test_serve_may_not(cluster: ControlPlane, verb: str, resource: str) -> None:
    kind, _, subresource = resource.partition("/")
    name, _, group = kind.partition(".")
    answer = cluster.request(
        "POST",
        "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": "system:serviceaccount:kvplace-system:kvplace-serve",
                "groups": ["system:serviceaccounts", "system:serviceaccounts:kvplace-system"],
                "resourceAttributes": {
                    "group": group,
                    "resource": name,
                    "subresource": subresource,
                    "verb": verb,
                    "namespace": "kvplace-system",
                },
            },
        },
    )
    assert answer["status"]["allowed"] is False


def test_the_scheduler_has_the_rights_of_the_main_one_and_its_own_lease(
    cluster: ControlPlane, everybodys: set[Right]
) -> None:
    token = cluster.service_account_token("kvplace-system", "kvplace-scheduler")
    shipped: set[Right] = set()
    for role in ("system:kube-scheduler", "system:volume-scheduler"):
        found = cluster.request("GET", f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{role}")
        shipped |= _all_rights(found)
    lease = rights("coordination.k8s.io", "leases", "get update", name="kvplace-scheduler")

    assert granted(cluster, "kvplace-system", token) - everybodys - shipped == lease
    assert lease.isdisjoint(granted(cluster, "default", token))
    kube_system = granted(cluster, "kube-system", token) - everybodys - shipped
    assert kube_system == rights(
        "", "configmaps", "get list watch", name="extension-apiserver-authentication"
    )


@pytest.mark.parametrize("role", ["view", "edit", "admin"])
def test_whoever_may_see_the_cluster_sees_ledgers_and_topologies_and_edits_neither(
    cluster: ControlPlane, role: str
) -> None:
    roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
    with watch_one_object(cluster, roles, role, "0") as events:
        # Another controller puts the aggregated rules there, some moments after the installation.
        assert any(_all_rights(event["object"]) >= VIEW for event in events)

    cluster.create_service_account("default", f"person-who-may-{role}")
    cluster.kubectl(
        *("create", "clusterrolebinding", f"person-who-may-{role}"),
        *(f"--clusterrole={role}", f"--serviceaccount=default:person-who-may-{role}"),
    )
    token = cluster.service_account_token("default", f"person-who-may-{role}")
    ours = {right for right in granted(cluster, "default", token) if right[0] == "kvplace.io"}
    assert ours == VIEW
