"""A cluster with kvplace, one node of eight CPUs, and a tenant who may edit one namespace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, Json, RequestRefused
from harness.control_plane.hollow_node import NodeShape, nodes_in_background
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation
from harness.waiting import wait_until

NODE = "worker"
CPUS = 8
"""CPUs of the node that pods may get; it has two more."""
PLACEMENT = json.dumps(
    {
        "version": 1,
        "podUid": "u",
        "node": NODE,
        "topology": "t",
        "policy": "exclusive",
        "vcpus": [2, 3],
        "emulator": [2, 3],
        "owned": "2-9",
        "cpus": "2-9",
    }
)
REQUEST = json.dumps({"version": 1, "vcpus": 8, "scope": "one-socket"})
RESULTS = {
    "kvplace.io/placement": PLACEMENT,
    "kvplace.io/request": REQUEST,
    "cpu-map": json.dumps({"socket0": ["2", "3", "4", "5", "6", "7", "8", "9"]}),
}
LABEL = {"kvplace.io/placed": "true"}
MARKER = {"limits": {"cpu": "2", "kvplace.io/vm": "0"}}
MINE = {"schedulerName": "kvplace-scheduler"}


@dataclass(frozen=True)
class Tenant:
    """A user with the role `edit` in a namespace."""

    cluster: ControlPlane
    namespace: str
    token: str

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def ask(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        return self.cluster.request(method, path, body, content_type=kind, token=self.token)

    def may(self, verb: str) -> bool:
        """Ask the API server whether he has a right to pods of his namespace."""
        asked = {"resourceAttributes": {"namespace": self.namespace, "verb": verb, "resource": "pods"}}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(self.ask("POST", path, {"spec": asked})["status"]["allowed"])

    def create_pod(self, name: str, metadata: Json | None = None, spec: Json | None = None) -> Json:
        """Create a pod; raises RequestRefused."""
        return self.ask("POST", self.pods, pod(name, metadata, spec))

    def patch_pod(self, name: str, change: Json, kind: str = MERGE_PATCH) -> Json:
        """Patch a pod; raises RequestRefused."""
        return self.ask("PATCH", f"{self.pods}/{name}", change, kind)

    def delete_pod(self, name: str) -> Json:
        return self.cluster.request("DELETE", f"{self.pods}/{name}", {"gracePeriodSeconds": 0})


def pod(name: str, metadata: Json | None = None, spec: Json | None = None, cpus: str = "2") -> Json:
    """Describe a pod of one container."""
    container: Json = {"name": "work", "image": "work.test/work", "resources": {"limits": {"cpu": cpus}}}
    return {
        "metadata": {"name": name, **(metadata or {})},
        "spec": {"containers": [container], "automountServiceAccountToken": False, **(spec or {})},
    }


def owners(cluster: ControlPlane) -> dict[str, str]:
    """Read who owns which CPU of the node."""
    ledger = tried(lambda: cluster.request("GET", f"/apis/kvplace.io/v1alpha1/nodeledgers/{NODE}"))
    if isinstance(ledger, RequestRefused):
        assert ledger.status == 404
        return {}
    found: dict[str, str] = ledger["spec"]["owners"]
    return found


def tried(request: Callable[[], Json]) -> Json | RequestRefused:
    """Make a request; returns the answer or how it was refused."""
    try:
        return request()
    except RequestRefused as refused:
        return refused


@pytest.fixture(scope="package")
def cluster(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane of its own."""
    assert kubernetes_programs.is_dir()
    with ControlPlane(controller_manager=True) as plane:
        yield plane


@pytest.fixture(scope="package")
def kvplace(cluster: ControlPlane) -> Iterator[Installation]:
    """Run kvplace, its webhooks and its scheduler, and a hollow node that a person has described."""
    cpu_map = json.dumps({"socket0": [str(cpu) for cpu in range(2, 2 + CPUS)]})
    shape = NodeShape(NODE, cpus=CPUS + 2, annotations={"cpu-map": cpu_map})
    with Installation(cluster) as installation, nodes_in_background(cluster, [shape]):
        installation.add_scheduler(installation.replicas[0])
        yield installation


@pytest.fixture(scope="package")
def tenant(cluster: ControlPlane, kvplace: Installation) -> Tenant:
    """Give a user `edit` in a namespace, as operators give it to tenants."""
    namespace = cluster.create_namespace("tenant")
    cluster.create_service_account(namespace, "somebody")
    cluster.kubectl(
        *("create", "rolebinding", "somebody-edits", "--clusterrole=edit"),
        *(f"--serviceaccount={namespace}:somebody", f"--namespace={namespace}"),
    )
    tenant = Tenant(cluster, namespace, cluster.service_account_token(namespace, "somebody"))
    # kube-controller-manager puts `edit` together from other roles, some time after it has started.
    controllers = cluster.server("kube-controller-manager")
    wait_until(
        lambda: tenant.may("create") and tenant.may("list"),
        lambda: f"the role edit gives no right to pods:\n{controllers.log_tail()}",
        pause_s=0.05,
    )
    return tenant


@pytest.fixture
def placed(tenant: Tenant) -> Iterator[Json]:
    """Give a pod of the tenant that has two CPUs, as everybody may ask for."""
    tenant.create_pod("placed", {"annotations": {"cpu-set": "one-socket"}})

    def is_bound(found: dict[str, Any]) -> bool:
        return "kvplace.io/placement" in found["metadata"].get("annotations", {})

    yield wait_for(tenant.cluster, tenant.pods, "placed", is_bound)
    tenant.delete_pod("placed")
    wait_for_no_owners(tenant.cluster)


def wait_for_no_owners(cluster: ControlPlane) -> None:
    """Wait until every CPU of the node is free again."""
    wait_for(
        cluster, "/apis/kvplace.io/v1alpha1/nodeledgers", NODE, lambda ledger: not ledger["spec"]["owners"]
    )


def everything_is_free(cluster: ControlPlane, tenant: Tenant) -> None:
    """Show that all CPUs of the node can still be had by a user with a request."""
    cluster.request(
        "POST", tenant.pods, pod("proof", {"annotations": {"cpu-set": "one-socket"}}, cpus=str(CPUS))
    )
    bound = wait_for(
        cluster,
        tenant.pods,
        "proof",
        lambda found: "kvplace.io/placement" in found["metadata"].get("annotations", {}),
    )
    assert owners(cluster) == {str(cpu): bound["metadata"]["uid"] for cpu in range(2, 2 + CPUS)}
    tenant.delete_pod("proof")
    wait_for_no_owners(cluster)


@pytest.fixture
def name(tenant: Tenant) -> Iterator[str]:
    """Give a name, and remove what was made under it."""
    yield "attempt"
    removed = tried(lambda: tenant.delete_pod("attempt"))
    assert not isinstance(removed, RequestRefused) or removed.status == 404
