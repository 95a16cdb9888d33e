"""`kvplace plan --live` on the real API server."""

from __future__ import annotations

import json

from kvplace.core.cpuset import parse_cpu_list
from tests.cli.live_cluster.small_cluster import MERGE_PATCH, Call, SmallCluster
from tests.docs.blocks import block


def test_vms_are_planned_on_the_cpus_that_the_ledgers_leave_free(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    free = {}
    for name in (cluster.first, cluster.second):
        node = json.loads(on_cluster("get", "node", name, "-o", "json").out)
        free[name] = parse_cpu_list(node["cpus"]["free"])
    called = on_cluster("plan", "--live", "--requests", "-", "-o", "json", stdin='{"vcpus": 2, "count": 12}')
    planned = [vm for vm in json.loads(called.out)["placed"] if vm["node"] in free]
    assert planned
    for vm in planned:
        cpus = parse_cpu_list(vm["placement"]["owned"])
        assert not cpus & ~free[vm["node"]]
        free[vm["node"]] &= ~cpus


def test_nodes_that_kube_scheduler_excludes_are_counted_in_the_refusal(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    plane, nodes = cluster.plane, "/api/v1/nodes"
    taint = {"key": "dedicated", "value": "db", "effect": "NoSchedule"}
    for name, spec in ((cluster.first, {"unschedulable": True}), (cluster.second, {"taints": [taint]})):
        plane.request("PATCH", f"{nodes}/{name}", {"spec": spec}, content_type=MERGE_PATCH)
    try:
        called = on_cluster("plan", "--live", "--requests", "-", "-o", "json", stdin='{"vcpus": 2}')
    finally:
        for name in (cluster.first, cluster.second):
            body = {"spec": {"unschedulable": None, "taints": None}}
            plane.request("PATCH", f"{nodes}/{name}", body, content_type=MERGE_PATCH)
    planned = json.loads(called.out)
    assert not {vm["node"] for vm in planned["placed"]} & {cluster.first, cluster.second}
    if planned["placed"]:
        return  # a node of another test has room
    reasons = {one["message"]: one["nodes"] for one in planned["refused"][0]["reasons"]}
    assert reasons["the taint dedicated=db:NoSchedule is not tolerated"] == 1
    assert reasons["the node is cordoned (spec.unschedulable)"] >= 1


def test_a_request_of_the_reference_goes_to_the_zone_whose_taint_it_tolerates(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    plane, path = cluster.plane, f"/api/v1/nodes/{cluster.second}"
    taint = {"key": "dedicated", "value": "db", "effect": "NoSchedule"}
    marked = {"metadata": {"labels": {"zone": "a"}}, "spec": {"taints": [taint]}}
    plane.request("PATCH", path, marked, content_type=MERGE_PATCH)
    request = block("docs/reference/cli.md", '{"id": "cache"')
    try:
        called = on_cluster("plan", "--live", "--requests", "-", "-o", "json", stdin=request)
    finally:
        unmarked = {"metadata": {"labels": {"zone": None}}, "spec": {"taints": None}}
        plane.request("PATCH", path, unmarked, content_type=MERGE_PATCH)
    (placed,) = json.loads(called.out)["placed"]
    assert (placed["id"], placed["node"]) == ("cache", cluster.second)


def test_a_vm_that_waits_already_comes_first(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("plan", "--live", "--requests", "-", "-o", "json", stdin='{"vcpus": 1}')
    assert "already came first" in called.err
    running = [vm["id"] for vm in json.loads(called.out)["running"]]
    assert f"{cluster.namespace}/late (waiting)" in running


def test_a_document_and_a_live_cluster_are_not_both_planned_on(on_cluster: Call) -> None:
    called = on_cluster("plan", "--cluster", "c.yaml", "--requests", "-", stdin='{"vcpus": 2}')
    assert called.code == 2
    assert "--cluster is a document; leave it out to plan on the live cluster" in called.err


def test_an_evacuation_states_where_each_vm_of_the_node_would_go_and_which_ones_restart(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    called = on_cluster("evacuate", cluster.first, "--dry-run", "-o", "json")
    document = json.loads(called.out)
    assert cluster.first not in {one["node"] for one in document["placed"]}
    assert {one["id"].split("/")[1] for one in document["placed"]} >= {"db", "web", "cache"}
    assert any(one["id"].endswith("/cache") for one in document["restarting"])
    assert called.code == 0
    table = on_cluster("evacuate", cluster.first, "--dry-run")
    assert "restarts" in table.out
    assert on_cluster("evacuate", cluster.second, "--dry-run").code == 0


def test_an_evacuation_moves_nothing_and_so_must_be_asked_for_as_a_dry_run(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    called = on_cluster("evacuate", cluster.first)
    assert called.code == 2
    assert f"add --dry-run, then move the VMs with `kubectl drain {cluster.first}`" in called.err
    missing = on_cluster("evacuate", cluster.first + "x", "--dry-run")
    assert missing.code == 1
    assert f"has no node '{cluster.first}x'; did you mean '{cluster.first}'?" in missing.err
