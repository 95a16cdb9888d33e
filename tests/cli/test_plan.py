"""`kvplace plan`: output, exit codes and invalid input."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cluster import room_in_cluster
from kvplace.core.cluster.planning import VmRequest
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.plan.plan_documents import vm_requests_of
from tests.cli.calls import Caller
from tests.core.invalid_input import DEEP_OR_LONG, answer_or_sentence, disturbed, json_values, texts

THREE = '{"id":"db","vcpus":8,"cpuSet":"one-numa","memory":"32Gi"}\n{"id":"web","vcpus":2,"count":2}\n'
TOO_MANY = '{"id":"vm","vcpus":30,"cpuSet":"one-numa","count":24}'
NONE = '{"vcpus":500}'
STREWN = """
nodes:
- name: worker
  machine: epyc-7502p
  running:
  - {id: a, request: {vcpus: 2, cpuSet: one-l3}, cpus: "4,36"}
  - {id: b, request: {vcpus: 2, cpuSet: one-l3}, cpus: "8,40"}
  - {id: c, request: {vcpus: 8, cpuSet: one-l3}, cpus: "12-15,44-47"}
  - {id: d, request: {vcpus: 8, cpuSet: one-l3}, cpus: "16-19,48-51"}
  - {id: e, request: {vcpus: 8, cpuSet: one-l3}, cpus: "20-23,52-55"}
  - {id: f, request: {vcpus: 8, cpuSet: one-l3}, cpus: "24-27,56-59"}
  - {id: g, request: {vcpus: 8, cpuSet: one-l3}, cpus: "28-31,60-63"}
"""


def planned(kvplace: Caller, requests: str, *options: str) -> dict[str, Any]:
    called = kvplace("plan", "--requests", "-", "-o", "json", *options, stdin=requests)
    assert called.err == ""
    document: dict[str, Any] = json.loads(called.out)
    return document


def test_the_table_has_a_row_for_every_vm_with_node_cpus_and_numa_nodes(kvplace: Caller) -> None:
    called = kvplace("plan", "--requests", "-", stdin=THREE)
    assert called.code == 0
    head, *rows = called.out.partition("\n\n")[0].splitlines()
    assert head.split() == ["VM", "NODE", "CPUS", "NUMA"]
    assert [row.split()[0] for row in rows] == ["db", "web-01", "web-02"]
    assert all(parse_cpu_list(row.split()[2]) for row in rows)
    assert "placed      3 of 3 VMs with 12 of 12 vCPUs" in called.out
    assert "one by one  3 of 3 VMs" in called.out


def test_wide_adds_sockets_caches_emulator_and_memory(kvplace: Caller) -> None:
    called = kvplace("plan", "--requests", "-", "-o", "wide", stdin=THREE)
    assert called.out.splitlines()[0].split()[4:] == ["SOCKETS", "L3", "EMULATOR", "MEMORY"]
    assert "0: 32Gi" in called.out.splitlines()[1]


def test_json_and_yaml_hold_the_same_document(kvplace: Caller) -> None:
    document = planned(kvplace, THREE)
    called = kvplace("plan", "--requests", "-", "-o", "yaml", stdin=THREE)
    assert yaml.safe_load(called.out) == document
    assert [one["id"] for one in document["placed"]] == ["db", "web-01", "web-02"]
    first = document["placed"][0]
    assert first["placement"]["node"] == first["node"]
    assert len(first["placement"]["vcpus"]) == 8
    assert document["summary"] == {
        "wanted": {"vms": 3, "vcpus": 12},
        "placed": {"vms": 3, "vcpus": 12},
        "oneByOne": {"vms": 3, "vcpus": 12},
    }
    assert document["refused"] == document["moves"] == []


def test_name_prints_the_vms_that_were_placed_and_nothing_else(kvplace: Caller) -> None:
    called = kvplace("plan", "--requests", "-", "-o", "name", stdin=THREE + NONE)
    assert called.out.split() == ["db", "web-01", "web-02"]
    assert called.err == "kvplace: do not fit: 1 of 4 VMs\n"
    assert called.code == 4


@pytest.mark.parametrize(
    ("requests", "code"), [(THREE, 0), (THREE + NONE, 4), (TOO_MANY, 4), (NONE, 3), ("", 2)]
)
def test_the_exit_code_states_whether_all_some_or_none_were_placed(
    kvplace: Caller, requests: str, code: int
) -> None:
    assert kvplace("plan", "--requests", "-", stdin=requests).code == code


def test_refused_vms_are_grouped_with_the_shortfall_and_the_number_of_nodes(kvplace: Caller) -> None:
    called = kvplace("plan", "--requests", "-", stdin=TOO_MANY)
    assert "refused     4 VMs" in called.out
    assert (
        "vm-21 and 3 more (30 vCPUs, one-numa): 6 nodes: no NUMA node with 30 free CPUs, best" in called.out
    )
    (group,) = planned(kvplace, TOO_MANY)["refused"]
    assert group["ids"] == ["vm-21", "vm-22", "vm-23", "vm-24"]
    assert sum(reason["nodes"] for reason in group["reasons"]) == 6
    assert {reason["reason"] for reason in group["reasons"]} == {"NoNumaNodeFits"}
    assert all(reason["shortfall"]["needed"] == 30 for reason in group["reasons"])


def test_running_vms_move_only_with_make_room_and_each_move_is_listed(
    kvplace: Caller, tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(STREWN)
    asked = '{"id":"new","vcpus":8,"cpuSet":"one-l3"}'
    assert kvplace("plan", "--cluster", str(cluster), "--requests", "-", stdin=asked).code == 3
    document = planned(kvplace, asked, "--cluster", str(cluster), "--make-room")
    (move,) = document["moves"]
    assert (move["node"], move["bytes"]) == ("worker", 0)
    assert move["id"] in "ab"
    assert [one["id"] for one in document["placed"]] == ["new"]
    called = kvplace("plan", "--cluster", str(cluster), "--requests", "-", "--make-room", stdin=asked)
    assert called.code == 0
    assert "moves       1 move of running VMs first\n" in called.out
    assert f"worker: {move['id']} from {move['from']} to {move['to']}" in called.out


def test_a_plan_whose_search_for_moves_stopped_at_its_bound_reports_it(
    kvplace: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_in_cluster, "_MAX_TOTAL_STEPS", 0)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(STREWN)
    asked = '{"id":"new","vcpus":8,"cpuSet":"one-l3"}'
    stopped = "the search for moves stopped at its bound; more VMs might fit"
    assert planned(kvplace, asked, "--cluster", str(cluster), "--make-room")["searchStopped"] == stopped
    called = kvplace("plan", "--cluster", str(cluster), "--requests", "-", "--make-room", stdin=asked)
    assert f"moves       {stopped}\n" in called.out


def test_ids_of_running_vms_cannot_be_given_again(kvplace: Caller, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(STREWN)
    called = kvplace("plan", "--cluster", str(cluster), "--requests", "-", stdin='{"id":"a","vcpus":1}')
    assert (called.code, called.err) == (
        2,
        "kvplace: <stdin>: line 1: a VM 'a' runs in the cluster already; use another id\n",
    )


def test_a_plan_places_more_than_one_after_the_other_where_space_is_short(kvplace: Caller) -> None:
    chance = Random(2)
    sizes = [chance.randrange(2, 25, 2) for _ in range(52)]
    asked = "\n".join(json.dumps({"vcpus": size, "cpuSet": "one-numa"}) for size in sizes)
    counted = planned(kvplace, asked)["summary"]
    assert counted["placed"]["vms"] > counted["oneByOne"]["vms"]


DB = [VmRequest("db", Request(8, PinningOptions(Scope.ONE_NUMA))), VmRequest("request-2", Request(2))]


@pytest.mark.parametrize(
    "text",
    [
        '{"id":"db","vcpus":8,"cpuSet":"one-numa"}\n\n{"vcpus":2}\n',
        '[{"id":"db","vcpus":8,"cpuSet":"one-numa"},\n{"vcpus":2}]',
        '{"requests":\n[{"id":"db","vcpus":8,"cpuSet":"one-numa"}, {"vcpus":2}]}',
        '{"requests": [{"id":"db","vcpus":8,"cpuSet":"one-numa"}, {"vcpus":2}]}',
        "- id: db\n  vcpus: 8\n  cpuSet: one-numa\n- vcpus: 2\n",
        "- {id: db, vcpus: 8, cpuSet: one-numa}\n- {vcpus: 2}\n",
        "# two\nrequests:\n- {id: db, vcpus: 8, cpuSet: one-numa}\n- {vcpus: 2}\n",
    ],
)
def test_requests_may_be_lines_or_a_list_in_json_or_yaml(text: str) -> None:
    assert list(vm_requests_of(text, "requests.txt")) == DB


def test_a_count_makes_equal_vms_with_numbered_names() -> None:
    found = vm_requests_of('{"id":"web","vcpus":2,"count":3}\n{"vcpus":4,"count":1}', "stdin")
    assert [vm.id for vm in found] == ["web-01", "web-02", "web-03", "request-2-01"]
    assert {vm.request for vm in found[:3]} == {Request(2)}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\n \n", '<stdin> contains no requests; write one per line, for example {"vcpus": 8}'),
        ("[]", "<stdin> contains no requests"),
        ('{"vcpus":8}\n{"vcpus":', "<stdin>: line 2 is not valid JSON"),
        ('{"vcpus":8}\n[]', "<stdin>: line 2 must be a JSON object"),
        ('{"vcpus":8}\n\n{"vcpu":8}', "<stdin>: line 3: 'vcpu' is not known; did you mean 'vcpus'?"),
        ('{"vcpus":0}', "<stdin>: line 1: vcpus is 0; it must be a whole number"),
        ('{"vcpus":-1}', "<stdin>: line 1: vcpus is -1; it must be a whole number from 1 to 4096"),
        ('{"vcpus":1000000}', "<stdin>: line 1: vcpus is 1000000"),
        ('{"vcpus":8,"memory":"8 GB"}', "<stdin>: line 1: memory"),
        ('{"vcpus":8,"free":"0-3"}', "<stdin>: line 1: 'free' is not known"),
        ('{"vcpus":8,"id":""}', "<stdin>: line 1: id is ''; it must not be empty"),
        ('{"vcpus":8,"id":"a\\nb"}', "<stdin>: line 1: id: 'a\\nb' has characters that cannot"),
        ('{"vcpus":8,"count":0}', "<stdin>: line 1: count is 0; it must be at least 1"),
        ('{"vcpus":8,"count":99999}', "<stdin>: line 1: count is 99999; it must be at most 20000"),
        ('{"vcpus":8,"count":20000}\n{"vcpus":8}', "<stdin> contains more than 20000 VMs"),
        ('{"vcpus":8,"vcpus":9}\n{"vcpus":8}', "<stdin>: line 1: duplicate key 'vcpus'"),
        ('{"vcpus":8,"id":"a"}\n{"vcpus":8,"id":"a"}', "<stdin>: line 2: duplicate VM id 'a'"),
        ('{"vcpus":8,"id":"a-01"}\n{"vcpus":8,"id":"a","count":2}', "line 2: duplicate VM id 'a-01'"),
        ('[{"vcpus":8},\n{"vcpus":}]', "<stdin> is not valid JSON: Expecting value: line 2 column 10"),
        ("- vcpus: 8\n- vcpus: {\n", "<stdin> is not valid YAML"),
        ("- vcpus: 8\n- vcpus: [x}\n", "line 2, column"),
        ("- 8\n", "<stdin>: requests[0] is 8; it must be a mapping"),
        ("vcpus: 8", "'vcpus' is not known"),
        ("requests: 8", "<stdin>: requests is 8; it must be a list"),
        ("just words", "the document is 'just words'; it must be a mapping"),
    ],
)
def test_an_invalid_request_is_one_sentence_that_states_where(
    kvplace: Caller, text: str, sentence: str
) -> None:
    called = kvplace("plan", "--requests", "-", stdin=text)
    assert (called.code, called.out) == (2, "")
    assert called.err.count("\n") == 1
    assert sentence in called.err


def test_files_that_cannot_be_read_are_named(kvplace: Caller, tmp_path: Path) -> None:
    for arguments in (("--requests", str(tmp_path / "none")), ("--requests", str(tmp_path))):
        called = kvplace("plan", *arguments)
        assert called.code == 2
        assert f"{arguments[1]} cannot be read" in called.err
    called = kvplace("plan", "--requests", "-", stdin=b"\xff\xfe")
    assert (called.code, called.err) == (
        2,
        "kvplace: <stdin> is not valid UTF-8: it is UTF-16, as some shells write it; save it as UTF-8\n",
    )
    called = kvplace("plan", "--cluster", str(tmp_path / "none"), "--requests", "-", stdin=THREE)
    assert called.code == 2
    assert str(tmp_path / "none") in called.err


def test_the_cluster_may_be_stdin_but_not_together_with_the_requests(kvplace: Caller, tmp_path: Path) -> None:
    requests = tmp_path / "requests"
    requests.write_text(THREE)
    cluster = "nodes: [{name: worker, machine: epyc-7502p}]"
    called = kvplace("plan", "--cluster", "-", "--requests", str(requests), "-o", "json", stdin=cluster)
    assert called.code == 0
    assert {vm["node"] for vm in json.loads(called.out)["placed"]} == {"worker"}
    called = kvplace("plan", "--cluster", "-", "--requests", str(requests), stdin="nodes: 3")
    assert (called.code, called.err) == (2, "kvplace: <stdin>: nodes is 3; it must be a list\n")
    called = kvplace("plan", "--cluster", "-", "--requests", "-", stdin=cluster)
    assert called.code == 2
    assert "--cluster and --requests cannot both be stdin" in called.err


def test_a_vm_that_runs_on_two_nodes_is_refused(kvplace: Caller, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    running = "running: [{id: a, request: {vcpus: 2}}]"
    names = "".join(f"- {{name: {name}, machine: epyc-7502p, {running}}}\n" for name in "xy")
    cluster.write_text(f"nodes:\n{names}")
    called = kvplace("plan", "--cluster", str(cluster), "--requests", "-", stdin=THREE)
    assert called.code == 2
    assert "cluster.yaml: duplicate id of a running VM: 'a'" in called.err


REQUEST = {
    "id": "a", "vcpus": 2, "count": 2, "cpuSet": "any", "policy": "exclusive", "memory": "1Gi",
    "hugepages": {"1Gi": 1},
}  # fmt: skip
_documents = st.one_of(
    texts,
    disturbed(REQUEST).map(json.dumps),
    st.lists(disturbed(REQUEST) | json_values, max_size=3).map(json.dumps),
    st.lists(disturbed(REQUEST), max_size=3).map(lambda lines: "\n".join(map(json.dumps, lines))),
    st.lists(disturbed(REQUEST), max_size=2).map(lambda found: yaml.safe_dump({"requests": found})),
    st.text(st.sampled_from("-[]{}:\"',\n #&*!|>%@`?vcpus8"), max_size=30),
    st.sampled_from(DEEP_OR_LONG),
)


@given(_documents)
def test_any_text_gives_vms_or_one_sentence(text: str) -> None:
    found, sentence = answer_or_sentence(lambda one: vm_requests_of(one, "stdin"), text, BadBody)
    assert bool(found) != bool(sentence)
    assert len({vm.id for vm in found or ()}) == len(found or ())


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"nodeSelector": {"zone": "a"}},
            "<stdin>: line 1: nodeSelector needs the labels and taints of a live cluster; plan with --live",
        ),
        ({"tolerations": [{"operater": "Exists"}]}, "did you mean 'operator'?"),
        ({"tolerations": [{"operator": "Exist"}]}, "tolerations[0].operator"),
        ({"affinity": {"podAffinity": {}}}, "podAffinity"),
        ({"nodeSelector": {"zone": 1}}, "nodeSelector.zone"),
    ],
)
def test_demands_of_a_request_on_its_node_are_read_strictly_and_only_for_live_clusters(
    kvplace: Caller, keys: dict[str, Any], sentence: str
) -> None:
    called = kvplace("plan", "--requests", "-", stdin=json.dumps({"vcpus": 2, **keys}))
    assert (called.code, called.out) == (2, "")
    assert sentence in called.err
