"""`kvplace top` on the real API server."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from kvplace.core.occupant import ClusterNode
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName
from tests.cli.live_cluster.small_cluster import (
    MANIFESTS,
    MERGE_PATCH,
    Call,
    SmallCluster,
    release_all,
    rows,
    run_vm,
)
from tests.nodes.machines import TWO


def test_nodes_are_listed_with_used_cpus_and_fragmentation(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("top", "nodes", "-l", f"tag={cluster.first.rpartition('-')[2]}")
    assert (called.code, called.err) == (0, "")
    table, summary = called.out.split("\n\n")
    head, *lines = rows(table)
    assert head[:5] == ["NODE", "VMS", "CPUS", "USED", "FREE"]
    by_name = {line[0]: line[1:] for line in lines}
    assert by_name[cluster.first][:4] == ["3", "16", "50%", "8"]
    assert by_name[cluster.second][:8] == ["0", "16", "0%", "16", "8", "8", "8", "0%"]
    assert by_name[cluster.bare][:3] == ["0", "-", "-"]
    assert "3 nodes, 1 of them cannot hold VMs" in summary
    assert "32 for VMs: 19% owned, 6% shared, 75% free" in summary


@pytest.mark.parametrize("what", ["get vms -A", "get nodes", "top nodes", "top vms -A"])
def test_lists_have_the_same_forms(on_cluster: Call, what: str) -> None:
    arguments = what.split()
    names = on_cluster(*arguments, "-o", "name").out.splitlines()
    assert names
    assert all(
        re.fullmatch(r"(node|pod|virtualmachine(instance)?\.kubevirt\.io)/[^/]+", name) for name in names
    )
    as_json = json.loads(on_cluster(*arguments, "-o", "json").out)
    assert as_json.keys() == yaml.safe_load(on_cluster(*arguments, "-o", "yaml").out).keys()
    wide, narrow = (on_cluster(*arguments, "-o", form).out.splitlines()[0] for form in ("wide", "table"))
    assert wide.split()[: len(narrow.split())] == narrow.split()


def test_the_fullest_nodes_come_first_when_wanted(on_cluster: Call, cluster: SmallCluster) -> None:
    tag = f"tag={cluster.first.rpartition('-')[2]}"
    called = on_cluster("top", "-l", tag, "--sort-by", "used", "--limit", "1", "-o", "json")
    document = json.loads(called.out)
    assert [node["name"] for node in document["nodes"]] == [cluster.first]
    assert (document["cluster"]["nodes"], document["cluster"]["usable"]) == (3, 2)
    assert (document["cluster"]["owned"], document["cluster"]["free"]) == (6, 24)


def test_vms_are_sorted_by_their_cpus(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("top", "vms", "-n", cluster.namespace)
    _, *lines = rows(called.out)
    assert [(line[0], line[2], line[3]) for line in lines] == [
        ("db", "4", "4"),
        ("cache", "2", "2"),
        ("late", "-", "-"),
    ]


def test_a_vm_that_has_ended_holds_nothing(on_cluster: Call, cluster: SmallCluster) -> None:
    namespace = cluster.plane.create_namespace(f"{cluster.namespace}-ended")
    try:
        node = ClusterNode(NodeName(cluster.second), TWO)
        run_vm(cluster, namespace, "done", node, Request(2), vmi=False, pinned=None)
        assert "done" in on_cluster("top", "vms", "-n", namespace).out
        cluster.plane.request(
            "PATCH",
            f"/api/v1/namespaces/{namespace}/pods/done/status",
            {"status": {"phase": "Succeeded"}},
            content_type=MERGE_PATCH,
        )
        called = on_cluster("top", "vms", "-n", namespace)
        assert (called.code, called.out) == (0, "")
        assert f"no VM that requests cores in {namespace}" in called.err
    finally:
        release_all(cluster, cluster.second)
        cluster.plane.remove_namespace(namespace)


def test_an_order_that_does_not_apply_is_refused(on_cluster: Call) -> None:
    called = on_cluster("top", "vms", "--sort-by", "fragmentation")
    assert called.code == 2
    assert "vms cannot be sorted by fragmentation, only by cpus, memory, name" in called.err


def test_the_role_for_viewers_is_all_that_the_whole_cluster_needs(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    plane, user = cluster.plane, f"viewer-{cluster.namespace}"
    people = MANIFESTS / "rbac" / "people.yaml"
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(people))
    binding = {
        "metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kvplace-viewer"},
        "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
    }
    plane.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)
    while (called := on_cluster("top", "nodes", "--as", user)).code == 2:
        assert "you may not list" in called.err  # until the API server has seen the binding
    assert (called.code, cluster.first in called.out) == (0, True)
    for command in (
        *(["get", "nodes"], ["get", "vms", "-A"], ["map", cluster.first], ["map", "--all"]),
        *(["explain", "vm/db", "-n", cluster.namespace], ["explain", "vm", "db", "-n", cluster.namespace]),
    ):
        called = on_cluster(*command, "--as", user)
        assert (called.code, called.err) == (0, "")
    plane.request("DELETE", f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{user}")
