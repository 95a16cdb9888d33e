"""`kvplace map` of nodes of a live cluster, on the real API server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calls import Caller
from tests.cli.live_cluster.small_cluster import Call, SmallCluster


def test_a_node_is_drawn_with_the_vms_of_its_ledger(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("map", cluster.first)
    assert (called.code, called.err) == (0, "")
    assert called.out.startswith(f"{cluster.first}: 16 CPUs, 8 free, 6 owned, 2 shared")
    for name in ("db", "web", "cache"):
        assert name in called.out
    document = json.loads(on_cluster("map", cluster.first, "-o", "json").out)
    assert {entry["vmi"] or entry["pod"] for entry in document["legend"]} == {"db", "web", "cache"}


def test_the_name_of_a_node_is_enough_where_there_is_a_kubeconfig(
    kvplace: Caller, cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.plane.kubeconfig))
    assert f"{cluster.second}: 16 CPUs, 16 free" in kvplace("map", cluster.second).out
    svg = tmp_path / "node.svg"
    assert kvplace("map", cluster.second, "-o", str(svg)).code == 0
    assert cluster.second in svg.read_text()


def test_a_node_may_be_named_almost_like_a_server_type(
    kvplace: Caller, cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.plane.kubeconfig))
    called = kvplace("map", "second-6338")
    assert called.code == 1
    assert "has no node 'second-6338'; did you mean" in called.err


def test_all_nodes_in_a_line_each(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("map", "--all")
    lines = {line.split()[0]: line for line in called.out.splitlines() if line}
    assert lines[cluster.second].split()[1:] == ["0", "16", "8", "....|...."]
    assert "neither a NodeTopology" in lines[cluster.bare]
    documents = json.loads(on_cluster("map", "--all", "-o", "json").out)
    assert documents["kind"] == "CoreMapList"
    assert {cluster.first, cluster.second} <= {item["name"] for item in documents["items"]}
    assert f"{cluster.first}: 16 CPUs" in on_cluster("map", "--all", "-o", "wide").out


def test_a_node_that_is_not_there_gets_a_suggestion(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("map", cluster.first + "x")
    assert called.code == 1
    assert f"has no node '{cluster.first}x'; did you mean '{cluster.first}'?" in called.err
    undrawn = on_cluster("map", cluster.bare)
    assert f"node {cluster.bare} cannot be drawn: neither a NodeTopology" in undrawn.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--all", "worker"], "name one node of the cluster, or give --all"),
        (["--live"], "name one node of the cluster, or give --all"),
        (["--live", "worker", "--foreign", "1"], "leave them out to draw a live cluster"),
        (["--all", "-o", "svg"], "an SVG shows one node"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(kvplace: Caller, arguments: list[str], said: str) -> None:
    called = kvplace("map", *arguments)
    assert called.code == 2
    assert said in called.err
