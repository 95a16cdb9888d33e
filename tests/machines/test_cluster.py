"""A cluster document becomes nodes with what runs there, or one sentence that names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.topology_document import topology_document
from kvplace.documents.reading import Part, read_document
from kvplace.machines.cluster import cluster_of, load_cluster
from kvplace.machines.server_types import SERVER_TYPES
from kvplace.machines.shipped import machine_document, read_machine
from tests.core.junk import DEEP_OR_LONG, answer_or_sentence, disturbed, texts

WHOLE: dict[str, Any] = {
    "nodes": [
        {"name": "worker", "count": 2, "machine": "2x-epyc-9354"},
        {
            "name": "edge",
            "machine": "epyc-7502p",
            "running": [
                {"id": "anywhere", "request": {"vcpus": 4}},
                {"id": "db", "request": {"vcpus": 8, "memory": "8Gi"}, "cpus": "2-5,34-37"},
            ],
        },
    ]
}


def cluster(document: dict[str, Any], folder: Path = Path()) -> tuple[ClusterNode, ...]:
    return cluster_of(Part("", document), folder)


def sentence(nodes: list[Any]) -> str:
    with pytest.raises(BadBody) as error:
        cluster({"nodes": nodes})
    return str(error.value)


def test_nodes_of_one_kind_are_numbered_and_a_single_one_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "nodes:\n- {name: worker, count: 3, machine: epyc-7502p}\n- {name: edge, machine: epyc-9654p}\n"
    )
    nodes = load_cluster(tmp_path / "c.yaml")
    assert [node.name for node in nodes] == ["worker-01", "worker-02", "worker-03", "edge"]
    assert nodes[0].topology == read_machine("epyc-7502p")
    assert all(node.running == () for node in nodes)


def test_a_running_vm_sits_on_the_cpus_that_the_document_names_and_others_beside_it() -> None:
    node = cluster(WHOLE)[-1]
    anywhere, db = node.running
    assert db.placement.owned == parse_cpu_list("2-5,34-37")
    assert anywhere.placement.owned & db.placement.owned == 0
    assert node.free.cpus == node.topology.allocatable & ~(anywhere.placement.owned | db.placement.owned)
    assert node.ledger.claims.keys() == {"anywhere", "db"}


def test_a_machine_is_read_from_a_file_beside_the_document(tmp_path: Path) -> None:
    (tmp_path / "box.json").write_text(json.dumps(machine_document(SERVER_TYPES[0])))
    (tmp_path / "c.json").write_text(json.dumps({"nodes": [{"name": "a", "topology": "box.json"}]}))
    (node,) = load_cluster(tmp_path / "c.json")
    assert topology_document(node.topology) == topology_document(read_machine(SERVER_TYPES[0].name))


def test_the_file_and_the_key_are_named_when_something_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n- {name: a, machine: epyc-7502}\n")
    with pytest.raises(BadBody, match=r"c\.yaml: nodes\[0\]\.machine: .*did you mean 'epyc-7502p'"):
        load_cluster(path)
    with pytest.raises(BadBody, match=r"missing\.yaml cannot be read: No such file"):
        load_cluster(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"name": "a"}, "nodes[0] must have either machine"),
        ({"machine": "epyc-7502p"}, "nodes[0].name is missing"),
        ({"name": "", "machine": "epyc-7502p"}, "nodes[0].name is ''"),
        (
            {"name": "a", "machin": "epyc-7502p"},
            "nodes[0]: the key 'machin' is not known; did you mean 'machine'?",
        ),
        ({"name": "a", "machine": "epyc-7502p", "topology": "x"}, "must have either"),
        (
            {"name": "a", "machine": "epyc-7502p", "count": 0},
            "nodes[0].count is 0; it must be a whole number",
        ),
        ({"name": "a", "topology": "gone.json"}, "nodes[0].topology: gone.json does not exist"),
        ("a", "nodes[0] is 'a'; it must be an object"),
    ],
)
def test_a_node_that_is_wrong_is_told_in_one_sentence(node: Any, said: str) -> None:
    assert said in sentence([node])


@pytest.mark.parametrize(
    ("vm", "said"),
    [
        ({"request": {"vcpus": 1}}, "nodes[0].running[0].id is missing"),
        ({"id": "a", "request": {}}, "nodes[0].running[0].request: vcpus is missing"),
        ({"id": "a", "request": {"vcpus": 1, "smt": "x"}}, "running[0].request: smt: 'x' is not known"),
        ({"id": "a", "request": {"vcpus": 500}}, "nodes[0].running[0]: the VM does not fit beside"),
        ({"id": "a", "request": {"vcpus": 1}, "cpus": 3}, "running[0].cpus is 3; it must be a CPU list"),
        ({"id": "a", "request": {"vcpus": 1}, "cpus": "3-"}, "nodes[0].running[0].cpus '3-'"),
        ({"id": "a", "request": {"vcpus": 4}, "cpus": "4"}, "the VM does not fit on CPUs 4"),
        ({"id": "a", "request": {"vcpus": 1}, "cpus": "4-9"}, "the VM takes only 8 of them"),
    ],
)  # fmt: skip
def test_a_running_vm_that_is_wrong_is_told_in_one_sentence(vm: Any, said: str) -> None:
    assert said in sentence([{"name": "n", "machine": "epyc-7502p", "running": [vm]}])


def test_names_stand_once_and_running_vms_need_a_node_of_their_own() -> None:
    one = {"name": "a", "machine": "epyc-7502p"}
    assert "nodes[1].name: a node 'a' stands in nodes[0] already" in sentence([one, one])
    vm = {"id": "v", "request": {"vcpus": 1}}
    assert "running needs a node of its own" in sentence([one | {"count": 2, "running": [vm]}])
    assert "needs an id of its own" in sentence([one | {"running": [vm, vm]}])
    assert "nodes is empty" in sentence([])
    assert "more than 10000 nodes" in sentence([one | {"count": 9999}, one, one | {"name": "b"}])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: &a [*a]", r"refers back with \*a"),
        ("a: 1\na: 2\n", "the key 'a' stands in it twice"),
        ('{"a": 1, "a": 2}', "the key 'a' stands in it twice"),
        ("- a\n", "must hold an object"),
        ("1: a\n'1': b\n", "the key '1' stands in it twice"),
        ("? [a]\n: b\n", "is no YAML"),
        ("a: [", "is no YAML"),
        ("- " * 200, "nests more than"),
        ("a: " + "9" * 6_000, "holds a number that cannot be read; quote it if"),
        ("a: 0x_", "holds a number that cannot be read"),
    ],
)
def test_a_text_that_cannot_mean_one_thing_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadBody, match=said):
        read_document(text, "c.yaml")


def test_keys_and_dates_are_texts_as_in_json() -> None:
    text = "2026-01-01: 2026-01-02T03:04:05Z\nin: [{1.50: a, 07: b, null: c, yes: d, <<: e}]"
    assert read_document(text, "c.yaml").keys == {
        "2026-01-01": "2026-01-02T03:04:05Z",
        "in": [{"1.50": "a", "07": "b", "null": "c", "yes": "d", "<<": "e"}],
    }


@given(texts | st.sampled_from(DEEP_OR_LONG))
def test_whatever_stands_in_a_file_is_read_or_refused_in_one_sentence(text: str) -> None:
    answer_or_sentence(lambda given: cluster_of(read_document(given, "c.yaml"), Path()), text, BadBody)


@given(disturbed(WHOLE["nodes"][1]))
def test_whatever_is_wrong_in_a_node_is_refused_in_one_sentence(node: dict[str, Any]) -> None:
    answer_or_sentence(lambda given: cluster({"nodes": [given]}), node, BadBody)
