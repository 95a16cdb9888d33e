"""Each right of `serve` and the agent is needed: without it the API server denies a call that they make."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import pytest
import yaml
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from harness.control_plane.cluster import ControlPlane, Json
from harness.waiting import PATIENCE_S
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.session import open_session
from tests.manifests.conftest import MANIFESTS
from tests.manifests.recorded_rights import denied_rights

Granted = tuple[str, str, str]
"""API group, resource, verb."""


def _granted(file: str) -> list[Granted]:
    documents = yaml.safe_load_all((MANIFESTS / file).read_text())
    (role,) = [found for found in documents if found["kind"] == "ClusterRole"]
    return [
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


GRANTED = {
    "serve": [
        *_granted("rbac/serve.yaml"),
        ("resource.k8s.io", "resourceclaims/status", "patch"),  # with the component dra-driver-cpu
    ],
    "agent": _granted("agent/rbac.yaml"),
}
ONE_BY_ONE = [(process, right) for process, rights in GRANTED.items() for right in rights]


@pytest.fixture(scope="module")
def plane(cluster: ControlPlane, resource_topologies: None) -> ControlPlane:
    """Serve all kinds: of one that is not served no client is denied anything."""
    cluster.request(
        "POST",
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        {
            "metadata": {"name": "virtualmachineinstances.kubevirt.io"},
            "spec": {
                "group": "kubevirt.io",
                "scope": "Namespaced",
                "names": {
                    "kind": "VirtualMachineInstance",
                    "listKind": "VirtualMachineInstanceList",
                    "plural": "virtualmachineinstances",
                    "singular": "virtualmachineinstance",
                },
                "versions": [
                    {
                        "name": "v1",
                        "served": True,
                        "storage": True,
                        "schema": {
                            "openAPIV3Schema": {
                                "type": "object",
                                "x-kubernetes-preserve-unknown-fields": True,
                            }
                        },
                    }
                ],
            },
        },
    )
    cluster.wait_for_crds("virtualmachineinstances.kubevirt.io")
    return cluster


def account_with(plane: ControlPlane, rights: Iterable[Granted]) -> str:
    """Make a service account in kvplace-system with these rights alone."""
    name = f"process-{secrets.token_hex(4)}"
    rules: list[Json] = [
        {"apiGroups": [group], "resources": [resource], "verbs": [verb]} for group, resource, verb in rights
    ]
    plane.create_service_account("kvplace-system", name)
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    plane.request("POST", f"{rbac}/clusterroles", {"metadata": {"name": name}, "rules": rules})
    plane.request(
        "POST",
        f"{rbac}/clusterrolebindings",
        {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "kvplace-system"}],
        },
    )
    return name


class NotYetGranted(Exception):
    """The API server has not taken a role into use yet, as it does some moments after it has stored it."""


@retry(
    retry=retry_if_exception_type(NotYetGranted),
    wait=wait_fixed(0.1),
    stop=stop_after_delay(PATIENCE_S),
    reraise=True,
)
async def denied_without(
    plane: ControlPlane, process: str, account: str, *, at_most: int
) -> set[tuple[str, str]]:
    """Make every call of a process with the rights of an account; returns what is denied."""
    options = CredentialOptions(kubeconfig=str(plane.service_account_kubeconfig("kvplace-system", account)))
    cluster = ApiCluster(await open_session(options))
    try:
        denied = await denied_rights(cluster, process)
    finally:
        await cluster.close()
    if len(denied) > at_most:
        raise NotYetGranted(denied)
    return denied


@pytest.mark.parametrize("process", GRANTED)
async def test_with_all_of_its_rights_a_process_is_denied_nothing(plane: ControlPlane, process: str) -> None:
    account = account_with(plane, GRANTED[process])
    assert await denied_without(plane, process, account, at_most=0) == set()


@pytest.mark.parametrize(
    ("process", "taken"),
    ONE_BY_ONE,
    ids=[f"{process} {right[2]} {right[1]}" for process, right in ONE_BY_ONE],
)
async def test_without_any_one_of_its_rights_a_process_is_denied_just_that(
    plane: ControlPlane, process: str, taken: Granted
) -> None:
    account = account_with(plane, [right for right in GRANTED[process] if right != taken])
    assert await denied_without(plane, process, account, at_most=1) == {(taken[1], taken[2])}
