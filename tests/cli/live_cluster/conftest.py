"""The fixture of a small cluster, and calls of `kvplace` on it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest

from harness.control_plane.cluster import ControlPlane, RequestRefused
from kvplace.core.node_topology import topology_document
from kvplace.core.occupant import ClusterNode
from kvplace.core.request import PinningOptions, Policy, Request, Scope
from kvplace.core.scalars import Bytes, NodeName
from tests.cli.calls import Called, Caller
from tests.cli.live_cluster.small_cluster import (
    MANIFESTS,
    OURS,
    Call,
    SmallCluster,
    create_node,
    create_pod,
    release_all,
    run_vm,
)
from tests.nodes.machines import TWO


@pytest.fixture(scope="package")
def served(control_plane: ControlPlane) -> ControlPlane:
    """Serve kvplace's kinds."""
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(MANIFESTS / "crd"))
    control_plane.wait_for_crds("nodeledgers.kvplace.io", "nodetopologies.kvplace.io")
    return control_plane


@pytest.fixture(scope="package")
def cluster(served: ControlPlane) -> Iterator[SmallCluster]:
    tag = secrets.token_hex(3)
    made = SmallCluster(
        served,
        served.create_namespace(f"shop-{tag}"),
        served.create_namespace(f"team-{tag}"),
        *(f"{name}-{tag}" for name in ("first", "second", "bare")),
    )
    for name in (made.first, made.second, made.bare):
        create_node(served, name, tag)
        if name != made.bare:
            topology = {"metadata": {"name": name}, "spec": topology_document(TWO)}
            served.request(
                "POST",
                f"{OURS}/nodetopologies",
                {"apiVersion": "kvplace.io/v1alpha1", "kind": "NodeTopology", **topology},
            )
    node = ClusterNode(NodeName(made.first), TWO)
    owning = Request(4, PinningOptions(scope=Scope.ONE_NUMA), memory=Bytes(2 << 30))
    sharing = Request(2, PinningOptions(scope=Scope.ONE_SOCKET, policy=Policy.SHARE))
    node = run_vm(made, made.namespace, "db", node, owning, vmi=True, pinned=True)
    node = run_vm(made, made.other, "web", node, sharing, vmi=True, pinned=False)
    run_vm(made, made.namespace, "cache", node, Request(2), vmi=False, pinned=None)
    create_pod(made, made.namespace, "late", Request(8), vmi=False)
    yield made
    for name in (made.first, made.second):
        with contextlib.suppress(RequestRefused):
            served.request("GET", f"{OURS}/nodeledgers/{name}")
            release_all(made, name)
    for name in (made.first, made.second, made.bare):
        served.request("DELETE", f"/api/v1/nodes/{name}")
    for namespace in (made.namespace, made.other):
        served.remove_namespace(namespace)


@pytest.fixture
def on_cluster(kvplace: Caller, cluster: SmallCluster) -> Call:
    """Call `kvplace` with the kubeconfig of the cluster's administrator."""

    def call(*arguments: str, stdin: str = "") -> Called:
        return kvplace(*arguments, "--kubeconfig", str(cluster.plane.kubeconfig), stdin=stdin)

    return call
