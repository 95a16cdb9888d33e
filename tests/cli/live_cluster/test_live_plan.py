"""`kvplace plan --live` on the real API server."""

from __future__ import annotations

import json

from kvplace.core.cpuset import parse_cpu_list
from tests.cli.live_cluster.small_cluster import Call, SmallCluster


def test_vms_are_planned_on_what_the_ledgers_leave_free(on_cluster: Call, cluster: SmallCluster) -> None:
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
    assert "cannot hold VMs, for example" in called.err, "of the node that is not described"


def test_a_document_and_a_live_cluster_are_not_both_planned_on(on_cluster: Call) -> None:
    called = on_cluster("plan", "--cluster", "c.yaml", "--requests", "-", stdin='{"vcpus": 2}')
    assert called.code == 2
    assert "--cluster is a document; leave it out to plan on the live cluster" in called.err
