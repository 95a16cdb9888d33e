"""A cluster document gives nodes with their running VMs, or one sentence that names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.node_topology import node_topology, topology_document
from kvplace.core.occupant import ClusterNode
from kvplace.documents.cluster import ClusterDocument
from kvplace.documents.model import read_model
from kvplace.machines.cluster import load_cluster, nodes_of
from kvplace.machines.server_types import read_machine
from tests.core.invalid_input import answer_or_sentence, disturbed

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


def cluster(document: dict[str, Any]) -> tuple[ClusterNode, ...]:
    return nodes_of(read_model(ClusterDocument, document, ""), Path())


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


def test_a_running_vm_has_the_cpus_that_the_document_names_and_others_get_free_ones() -> None:
    node = cluster(WHOLE)[-1]
    anywhere, db = node.running
    assert db.placement.owned == parse_cpu_list("2-5,34-37")
    assert anywhere.placement.owned & db.placement.owned == 0
    assert node.free.cpus == node.topology.allocatable & ~(anywhere.placement.owned | db.placement.owned)
    assert [vm.id for vm in node.running] == ["anywhere", "db"]


def test_a_machine_is_read_from_a_file_beside_the_document(tmp_path: Path) -> None:
    (tmp_path / "box.json").write_text(json.dumps(node_topology("box", read_machine("epyc-7502p"))))
    (tmp_path / "c.json").write_text(json.dumps({"nodes": [{"name": "a", "topology": "box.json"}]}))
    (node,) = load_cluster(tmp_path / "c.json")
    assert topology_document(node.topology) == topology_document(read_machine("epyc-7502p"))


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
        ({"name": "a"}, "nodes[0]: must have either machine"),
        (
            {
                "name": "a",
                "machine": "2x-xeon-6338",
                "devices": [{"resource": "intel.com/vf", "numaNode": 7}],
            },
            "nodes[0].devices[0].numaNode is 7; the machine has NUMA nodes 0-1",
        ),
        ({"machine": "epyc-7502p"}, "nodes[0].name is missing"),
        ({"name": "", "machine": "epyc-7502p"}, "nodes[0].name is ''; it must not be empty"),
        (
            {"name": "a", "machin": "epyc-7502p"},
            "nodes[0]: 'machin' is not known; did you mean 'machine'?",
        ),
        ({"name": "a", "machine": "epyc-7502p", "topology": "x"}, "must have either"),
        (
            {"name": "a", "machine": "epyc-7502p", "count": 0},
            "nodes[0].count is 0; it must be at least 1",
        ),
        ({"name": "a", "topology": "gone.json"}, "nodes[0].topology: gone.json does not exist"),
        ("a", "nodes[0] is 'a'; it must be a mapping"),
    ],
)
def test_an_invalid_node_is_refused_in_one_sentence_with_the_path_of_the_key(node: Any, said: str) -> None:
    assert said in sentence([node])


@pytest.mark.parametrize(
    ("vm", "said"),
    [
        ({"request": {"vcpus": 1}}, "nodes[0].running[0].id is missing"),
        ({"id": "a"}, "nodes[0].running[0].request is missing"),
        ({"id": "a", "request": {}}, "nodes[0].running[0].request: vcpus is missing"),
        ({"id": "a", "request": {"vcpus": 1, "smt": "x"}}, "request: smt is 'x'; it must be one of"),
        ({"id": "a", "request": {"vcpus": 500}}, "nodes[0].running[0]: the VM does not fit: no socket"),
        ({"id": "a", "request": {"vcpus": 1}, "cpus": 3}, "running[0].cpus: 3 is not a CPU list such as"),
        ({"id": "a", "request": {"vcpus": 1}, "cpus": "3-"}, "nodes[0].running[0].cpus: the CPU list '3-'"),
        ({"id": "a", "request": {"vcpus": 4}, "cpus": "4"}, "the VM does not fit on CPUs 4"),
        ({"id": "a", "request": {"vcpus": 1}, "cpus": "4-9"}, "the VM takes only 8 of them"),
    ],
)  # fmt: skip
def test_an_invalid_running_vm_is_refused_in_one_sentence_with_the_path_of_the_key(
    vm: Any, said: str
) -> None:
    assert said in sentence([{"name": "n", "machine": "epyc-7502p", "running": [vm]}])


def test_duplicate_names_and_running_vms_on_counted_nodes_are_refused() -> None:
    one = {"name": "a", "machine": "epyc-7502p"}
    assert "nodes[1].name: duplicate node name 'a'" in sentence([one, one])
    vm = {"id": "v", "request": {"vcpus": 1}}
    assert "nodes[0]: a node with running VMs must not have a count" in sentence(
        [one | {"count": 2, "running": [vm]}]
    )
    assert "duplicate id of a running VM: 'v'" in sentence([one | {"running": [vm, vm]}])
    assert "nodes is []; it must not be empty" in sentence([])
    assert "more than 10000 nodes" in sentence([one | {"count": 9999}, one, one | {"name": "b"}])


@given(disturbed(WHOLE["nodes"][1]))
def test_any_node_is_read_or_refused_in_one_sentence(node: dict[str, Any]) -> None:
    answer_or_sentence(lambda given: cluster({"nodes": [given]}), node, BadBody)
