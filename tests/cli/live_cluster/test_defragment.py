"""`kvplace defragment` on the real API server."""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from harness.control_plane.cluster import STRATEGIC_MERGE_PATCH
from harness.waiting import wait_until
from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster import defragmentation
from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.node_topology import Enforcement, topology_document
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import PodPlacement
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.well_known_names import MOVABLE, PLACE_AGAIN, PLACEMENT, RELOCATED
from tests.cli.live_cluster.small_cluster import (
    MERGE_PATCH,
    OURS,
    Call,
    SmallCluster,
    create_node,
    release_all,
    run_vm,
)
from tests.nodes.machines import TWO


@pytest.fixture
def split(cluster: SmallCluster) -> Iterator[tuple[str, str]]:
    """A node with a movable pod over both sockets, alone there; returns the label of the node and the pod."""
    plane, tag = cluster.plane, secrets.token_hex(3)
    node, name = f"split-{tag}", f"wide-{tag}"
    create_node(plane, node, tag)
    topology = {"metadata": {"name": node}, "spec": topology_document(TWO)}
    kind = {"apiVersion": "kvplace.io/v1alpha1", "kind": "NodeTopology"}
    plane.request("POST", f"{OURS}/nodetopologies", {**kind, **topology})
    request = Request(4, PinningOptions(Scope.ANY).of_plain_pod())
    empty = ClusterNode(NodeName(node), TWO)
    few = CpuMask(sum(mask_of([min_cpu, min_cpu + 8]) for min_cpu in (0, 4)))
    left = try_place(TWO, empty.free.within(CpuMask(TWO.cpus & ~few)), Request(12, request.options))
    assert left is not None
    crowded = replace(empty, running=(Occupant("gone", Request(12), left),))
    run_vm(cluster, cluster.namespace, name, crowded, request, vmi=False, pinned=True)
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{name}"
    asking = {"metadata": {"annotations": {"cpu-set": "any", MOVABLE: "true"}}}
    pod = plane.request("PATCH", path, asking, content_type=MERGE_PATCH)
    report = {"uid": pod["metadata"]["uid"], "namespace": cluster.namespace, "pod": name}
    reported = {**report, "revision": 1, "pinned": True, "running": True}
    status = {"status": {"enforcement": Enforcement.NRI.value, "pods": [reported]}}
    plane.request("PATCH", f"{OURS}/nodetopologies/{node}/status", status, content_type=MERGE_PATCH)
    yield f"tag={tag}", path
    plane.request("DELETE", path, {"gracePeriodSeconds": 0})
    release_all(cluster, node)
    plane.request("DELETE", f"/api/v1/nodes/{node}")
    plane.request("DELETE", f"{OURS}/nodetopologies/{node}")


def test_a_dry_run_prints_the_moves_and_their_gain_and_writes_nothing(
    on_cluster: Call, cluster: SmallCluster, split: tuple[str, str]
) -> None:
    nodes, path = split
    before = cluster.plane.request("GET", path)["metadata"]["resourceVersion"]
    called = on_cluster("defragment", "--nodes", nodes, "--dry-run", "-o", "json")
    assert called.code == 0
    document = json.loads(called.out)
    (move,) = document["moves"]
    assert move["vm"].endswith(path.rpartition("/")[2])
    assert move["node"] == move["target"]
    assert move["comesTogether"]
    assert parse_cpu_list(move["to"]) != parse_cpu_list(move["from"])
    assert (document["before"]["splitVms"], document["after"]["splitVms"]) == (1, 0)
    assert document["complete"] is True
    assert cluster.plane.request("GET", path)["metadata"]["resourceVersion"] == before
    table = on_cluster("defragment", "--nodes", nodes, "--dry-run")
    assert "comes together" in table.out
    assert "1 -> 0" in table.out
    assert on_cluster("defragment", "--nodes", nodes, "--dry-run", "-o", "name").out == f"{move['vm']}\n"


def test_vms_without_consent_stay_with_the_reason_and_nodes_without_the_labels_are_left_out(
    on_cluster: Call, cluster: SmallCluster, split: tuple[str, str]
) -> None:
    nodes, path = split
    refuses = {"metadata": {"annotations": {MOVABLE: "false"}}}
    cluster.plane.request("PATCH", path, refuses, content_type=MERGE_PATCH)
    called = on_cluster("defragment", "--nodes", nodes, "--dry-run")
    assert called.code == 0
    assert "have not agreed (kvplace.io/movable): 1 VM" in called.err
    assert "no move gains anything" in called.out
    assert on_cluster("defragment", "--nodes", "tag=none", "--dry-run").code == 0


def test_ctrl_c_during_the_search_prints_the_moves_so_far_and_makes_none(
    on_cluster: Call, cluster: SmallCluster, split: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, path = split
    search = defragmentation.defragment

    def interrupted(*there: Any, **watched: Any) -> defragmentation.Defragmentation:
        found = search(*there, **watched)
        os.kill(os.getpid(), signal.SIGINT)
        return replace(found, complete=False)

    monkeypatch.setattr(defragmentation, "defragment", interrupted)
    before = cluster.plane.request("GET", path)["metadata"]["resourceVersion"]
    called = on_cluster("defragment", "--nodes", nodes, "--yes", "-o", "json")
    assert called.code == 130
    document = json.loads(called.out)
    assert document["interrupted"] == "the search was interrupted; a longer one may find more moves"
    assert ["made" in move for move in document["moves"]] == [False]
    assert "stopped at its bound" not in called.err
    assert cluster.plane.request("GET", path)["metadata"]["resourceVersion"] == before


def test_without_a_terminal_the_command_needs_yes(on_cluster: Call) -> None:
    called = on_cluster("defragment")
    assert called.code == 2
    assert "--yes" in called.err


def test_a_move_that_serve_refuses_is_reported_and_leaves_no_annotation(
    on_cluster: Call, cluster: SmallCluster, split: tuple[str, str]
) -> None:
    nodes, path = split
    seen: list[Any] = []

    def serve() -> None:
        def annotations() -> Any:
            return cluster.plane.request("GET", path)["metadata"]["annotations"]

        wait_until(lambda: PLACE_AGAIN in annotations(), lambda: "no move was requested", pause_s=0.2)
        seen.append(annotations()[PLACE_AGAIN])
        condition = {"type": RELOCATED, "status": "False", "reason": "NotRelocated", "message": "no room"}
        status = {"status": {"conditions": [condition]}}
        cluster.plane.request("PATCH", f"{path}/status", status, content_type=STRATEGIC_MERGE_PATCH)

    playing = threading.Thread(target=serve)
    playing.start()
    called = on_cluster("defragment", "--nodes", nodes, "--yes", "-o", "json")
    playing.join()
    pod = cluster.plane.request("GET", path)
    assert called.code == 1
    assert "no room" in called.err
    assert "0 of 1 moves made; call defragment again" in called.err
    (move,) = json.loads(called.out)["moves"]
    assert (move["made"], move["error"]) == (False, "no room")
    placed = PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT])
    assert seen == [f"{pod['metadata']['uid']}/{placed.revision}"]
    assert PLACE_AGAIN not in pod["metadata"]["annotations"]
