"""With the component moves-between-nodes, `serve` creates and deletes its own migrations and no others."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest

from harness.control_plane.cluster import ControlPlane, Json, RequestRefused
from kvplace.core.scalars import NodeName
from kvplace.kube.migrations import PlannedMigration
from tests.manifests.conftest import MANIFESTS
from tests.manifests.policies import granted, refused

KIND = "virtualmachineinstancemigrations"
LABELLED = 'kvplace-serve may create and delete only migrations with the label kvplace.io/move: "true"'
Send = Callable[[str, str, Json | None], Json]


@pytest.fixture(scope="module")
def serve(cluster: ControlPlane) -> Iterator[tuple[Send, str]]:
    """Serve the kind without KubeVirt, install the component for this module, and give `serve`'s requests."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    cluster.request(
        "POST",
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        {
            "metadata": {"name": f"{KIND}.kubevirt.io"},
            "spec": {
                "group": "kubevirt.io",
                "scope": "Namespaced",
                "names": {
                    "kind": "VirtualMachineInstanceMigration",
                    "listKind": "VirtualMachineInstanceMigrationList",
                    "plural": KIND,
                    "singular": "virtualmachineinstancemigration",
                },
                "versions": [version],
            },
        },
    )
    cluster.wait_for_crds(f"{KIND}.kubevirt.io")
    files = [str(MANIFESTS / "moves-between-nodes" / name) for name in ("rbac.yaml", "policy.yaml")]
    for file in files:
        cluster.kubectl("apply", "--server-side", "-f", file)
    namespace = cluster.create_namespace(f"moves-{secrets.token_hex(4)}")
    token = cluster.service_account_token("kvplace-system", "kvplace-serve")
    path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{KIND}"

    def send(method: str, rest: str = "", body: Json | None = None) -> Json:
        return cluster.request(method, f"{path}{rest}", body, token=token)

    # The role is in effect some moments after it was stored, and so is the policy.
    granted(lambda: send("POST", "?dryRun=All", migration()))
    refused(lambda: send("POST", "?dryRun=All", migration(label=None)))
    yield send, path
    for file in files:
        cluster.kubectl("delete", "-f", file)
    refused(lambda: send("GET"))
    cluster.kubectl("delete", "crd", f"{KIND}.kubevirt.io")


def migration(*, label: str | None = "true", target: bool = True) -> Json:
    """Write a migration as `serve` does, but for its label or its target."""
    document = PlannedMigration("a", f"move-{secrets.token_hex(4)}", "db", NodeName("worker")).document()
    del document["metadata"]["namespace"]
    document["metadata"]["labels"] = {} if label is None else {"kvplace.io/move": label}
    if not target:
        del document["spec"]["addedNodeSelector"]
    return document


def test_serve_creates_and_deletes_migrations_that_carry_its_label(serve: tuple[Send, str]) -> None:
    send, _ = serve
    made = send("POST", "", migration())
    assert made["spec"]["addedNodeSelector"] == {"kubernetes.io/hostname": "worker"}
    assert len(send("GET", "", None)["items"]) == 1
    send("DELETE", f"/{made['metadata']['name']}", None)
    assert send("GET", "", None)["items"] == []


@pytest.mark.parametrize("label", [None, "false", ""])
def test_serve_creates_no_migration_without_its_label(serve: tuple[Send, str], label: str | None) -> None:
    with pytest.raises(RequestRefused, match=LABELLED):
        serve[0]("POST", "", migration(label=label))


def test_serve_creates_no_migration_to_any_node(serve: tuple[Send, str]) -> None:
    with pytest.raises(RequestRefused, match="must name its target"):
        serve[0]("POST", "", migration(target=False))


def test_serve_deletes_no_migration_of_others(cluster: ControlPlane, serve: tuple[Send, str]) -> None:
    send, path = serve
    others = cluster.request("POST", path, migration(label=None))["metadata"]["name"]
    with pytest.raises(RequestRefused, match=LABELLED):
        send("DELETE", f"/{others}", None)
    cluster.request("DELETE", f"{path}/{others}")
