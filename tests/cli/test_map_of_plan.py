"""`kvplace map` draws a node of a plan: VMs that run there, that move, and that are placed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.cli.claims_by_node import read_placements
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadBody
from tests.cli.calls import Caller
from tests.core.invalid_input import answer_or_sentence

NAME = "epyc-7502p"
CLUSTER = """
nodes:
- name: worker
  machine: epyc-7502p
  running:
  - {id: a, request: {vcpus: 2, cpuSet: one-l3}, cpus: "4,36"}
  - {id: b, request: {vcpus: 2, cpuSet: one-l3}, cpus: "8,40"}
  - {id: c, request: {vcpus: 40}, cpus: "12-31,44-63"}
- {name: large, machine: 2x-epyc-9354-nps2}
- {name: idle, machine: epyc-7502p}
"""
REQUESTS = """
{"id":"new","vcpus":8,"cpuSet":"one-l3"}
{"id":"wide","vcpus":120,"cpuSet":"any"}
{"id":"all","vcpus":60}
"""


@pytest.fixture
def plan(kvplace: Caller, tmp_path: Path) -> Path:
    """A plan with a moved VM on one node, and VMs on two others."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    return planned(kvplace, tmp_path, REQUESTS, "json")


def planned(kvplace: Caller, folder: Path, requests: str, form: str) -> Path:
    cluster = str(folder / "cluster.yaml")
    called = kvplace(
        "plan", "--cluster", cluster, "--requests", "-", "--make-room", "-o", form, stdin=requests
    )
    assert called.err == ""
    path = folder / f"plan.{form}"
    path.write_text(called.out, encoding="utf-8")
    return path


def drawn(kvplace: Caller, plan: Path, machine: str, node: str) -> dict[str, str]:
    """The CPUs of each VM in the map of a node that has no notes on stderr."""
    called = kvplace("map", machine, "--placements", str(plan), "--node", node, "-o", "json")
    assert (called.code, called.err) == (0, "")
    document: dict[str, Any] = json.loads(called.out)
    assert document["name"] == node
    return {entry["pod"]: entry["cpus"] for entry in document["legend"]}


def cpus_in(document: dict[str, Any], node: str) -> dict[str, str]:
    """Where the VMs of a node are after the plan, by the plan's own words."""
    found = {vm["id"]: vm["placement"]["cpus"] for vm in document["running"] if vm["node"] == node}
    found |= {move["id"]: move["to"] for move in document["moves"] if move["node"] == node}
    return found | {vm["id"]: vm["placement"]["cpus"] for vm in document["placed"] if vm["node"] == node}


def test_a_node_is_drawn_as_it_is_after_the_moves_of_the_plan(kvplace: Caller, plan: Path) -> None:
    document = json.loads(plan.read_text())
    (move,) = document["moves"]
    assert move["id"] in "ab"
    assert move["placement"]["cpus"] == move["to"] != move["from"]
    found = drawn(kvplace, plan, NAME, "worker")
    assert found == cpus_in(document, "worker")
    assert set(found) == {"a", "b", "c", "new"}
    assert found[move["id"]] == move["to"]


def test_each_node_of_a_plan_has_a_map_of_its_own(kvplace: Caller, plan: Path) -> None:
    document = json.loads(plan.read_text())
    assert drawn(kvplace, plan, "2x-epyc-9354-nps2", "large") == cpus_in(document, "large")
    assert set(drawn(kvplace, plan, NAME, "idle")) == {"all"}


def test_running_vms_are_in_a_plan_where_they_are_before_its_moves(plan: Path) -> None:
    running = json.loads(plan.read_text())["running"]
    assert {vm["id"]: vm["placement"]["cpus"] for vm in running} == {
        "a": "4,36",
        "b": "8,40",
        "c": "12-31,44-63",
    }
    assert {vm["placement"]["node"] for vm in running} == {"worker"}


def test_a_plan_in_yaml_is_drawn_like_one_in_json(kvplace: Caller, plan: Path) -> None:
    same = planned(kvplace, plan.parent, REQUESTS, "yaml")
    assert drawn(kvplace, same, NAME, "worker") == drawn(kvplace, plan, NAME, "worker")


def test_a_plan_for_one_node_needs_no_node_option(kvplace: Caller, plan: Path) -> None:
    small = planned(kvplace, plan.parent, '{"id":"web","vcpus":2,"cpuSet":"one-l3"}', "json")
    document = json.loads(small.read_text())
    assert {vm["node"] for vm in document["placed"] + document["running"]} == {"worker"}
    called = kvplace("map", NAME, "--placements", str(small))
    assert called.code == 0
    assert called.err == f"kvplace: {small} describes node worker, drawn on epyc-7502p\n"


def test_a_plan_for_several_nodes_needs_the_node_option(kvplace: Caller, plan: Path) -> None:
    called = kvplace("map", NAME, "--placements", str(plan))
    assert (called.code, called.out) == (2, "")
    assert called.err == (
        f"kvplace: {plan} describes the nodes idle, large, worker, none of them named epyc-7502p; "
        "choose one with --node\n"
    )


@pytest.mark.parametrize(
    ("node", "hint"),
    [("workr", "did you mean 'worker'?"), ("zoo", "it describes idle, large, worker"), ("", "it describes")],
)
def test_a_node_that_the_plan_does_not_describe_is_refused(
    kvplace: Caller, plan: Path, node: str, hint: str
) -> None:
    called = kvplace("map", NAME, "--placements", str(plan), "--node", node)
    assert (called.code, called.out, called.err.count("\n")) == (2, "", 1)
    assert f"{plan} contains no VM on node {node!r}; {hint}" in called.err


def test_placements_without_a_node_cannot_be_chosen_by_node(kvplace: Caller) -> None:
    called = kvplace("map", NAME, "--placements", "-", "--node", "worker", stdin='{"placed": []}')
    assert called.code == 2
    assert "contains no VM on node 'worker'; it names no node, leave out --node" in called.err


def test_node_without_placements_is_an_error(kvplace: Caller) -> None:
    called = kvplace("map", NAME, "--node", "worker")
    assert (called.code, called.out) == (2, "")
    assert "--node chooses a node of --placements; give --placements too" in called.err


def test_only_placements_of_the_drawn_node_are_compared_with_its_machine(kvplace: Caller, plan: Path) -> None:
    called = kvplace("map", NAME, "--placements", str(plan), "--node", "large")
    assert called.code == 0
    assert called.err.startswith(
        f"kvplace: {plan} contains 1 placement made for a machine with another fingerprint"
    )
    assert "but the machine has no such CPU" in called.err


def test_a_plan_without_its_running_vms_gets_a_note_for_each_move(kvplace: Caller, plan: Path) -> None:
    document = json.loads(plan.read_text())
    del document["running"]
    plan.write_text(json.dumps(document), encoding="utf-8")
    called = kvplace("map", NAME, "--placements", str(plan), "--node", "worker")
    assert called.code == 0
    assert f"{document['moves'][0]['id']!r} is moved but was not placed" in called.err


def test_moved_vms_keep_none_of_their_old_cpus(kvplace: Caller, plan: Path) -> None:
    found = drawn(kvplace, plan, NAME, "worker")
    sizes = [parse_cpu_list(cpus).bit_count() for cpus in found.values()]
    together = parse_cpu_list(",".join(found.values()))
    assert sorted(sizes) == [2, 2, 8, 40]
    assert together.bit_count() == sum(sizes)


@given(st.text(max_size=20))
def test_an_unknown_node_is_one_sentence(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text('{"placed": []}', encoding="utf-8")
    answer, _ = answer_or_sentence(
        lambda node: read_placements(str(path), NAME, "", node=node), name, BadBody
    )
    assert answer is None
