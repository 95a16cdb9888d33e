"""The requests of kube-scheduler, in any case of letters, and the shape of the answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.errors import BadBody
from kvplace.core.scalars import NodeName, PodUid
from kvplace.scheduler.extender_protocol import (
    MAX_BODY,
    MAX_NODES,
    BindingArgs,
    BindingResult,
    FilterResult,
    HostPriority,
    read_binding_args,
    read_extender_args,
    read_preemption_args,
)
from tests.core.invalid_input import DEEP_OR_LONG, answer_or_sentence, disturbed, json_values

POD: dict[str, Any] = {
    "metadata": {
        "name": "virt-launcher-db",
        "namespace": "prod",
        "uid": "uid-1",
        "annotations": {"kvplace.io/request": "{}", "other": "x"},
        "labels": {"kubevirt.io": "virt-launcher", "kvplace.io/placed": "true"},
        "ownerReferences": [
            {
                "apiVersion": "kubevirt.io/v1",
                "kind": "VirtualMachineInstance",
                "name": "db",
                "uid": "vmi-1",
                "controller": True,
            }
        ],
    },
    "spec": {"containers": [{"name": "compute"}]},
    "status": {"phase": "Pending"},
}
ARGS: dict[str, Any] = {"Pod": POD, "Nodes": None, "NodeNames": ["n1", "n2"]}
BIND: dict[str, Any] = {
    "PodName": "virt-launcher-db",
    "PodNamespace": "prod",
    "PodUID": "uid-1",
    "Node": "n1",
}


def body(value: object) -> bytes:
    return json.dumps(value).encode()


def test_a_request_of_names_is_read() -> None:
    args = read_extender_args(body(ARGS))
    assert args.names == ["n1", "n2"]
    assert args.nodes is None
    assert (args.pod.name, args.pod.namespace, args.pod.uid) == ("virt-launcher-db", "prod", "uid-1")
    assert args.pod.request == "{}"
    assert (args.pod.vmi, args.pod.vmi_uid) == ("db", "vmi-1")


def test_keys_are_read_in_any_case() -> None:
    lower = {key.lower(): value for key, value in ARGS.items()}
    assert read_extender_args(body(lower)) == read_extender_args(body(ARGS))
    assert read_binding_args(body({key.upper(): value for key, value in BIND.items()})) == BindingArgs(
        "virt-launcher-db", "prod", PodUid("uid-1"), NodeName("n1")
    )


def test_unknown_keys_and_fields_of_later_kubernetes_are_skipped() -> None:
    assert read_extender_args(body(ARGS | {"Later": {"deep": [1]}})) == read_extender_args(body(ARGS))


def test_whole_nodes_are_read_by_name_and_given_back_byte_for_byte() -> None:
    nodes = [{"metadata": {"name": name}, "status": {"images": [name] * 3}} for name in ("n1", "n2")]
    args = read_extender_args(body({"Pod": POD, "Nodes": {"items": nodes}, "NodeNames": None}))
    assert args.names == ["n1", "n2"]
    assert args.nodes is not None
    answer = FilterResult(nodes={"items": [args.nodes["n2"]]})
    assert json.loads(msgspec.json.encode(answer))["Nodes"] == {"items": [nodes[1]]}


def test_names_count_when_both_are_there() -> None:
    both = ARGS | {"Nodes": {"items": [{"metadata": {"name": "n9"}}]}}
    assert read_extender_args(body(both)).names == ["n1", "n2"]


def test_an_empty_list_of_nodes_is_not_an_error() -> None:
    assert read_extender_args(body(ARGS | {"NodeNames": []})).names == []
    assert read_extender_args(body({"Pod": POD, "Nodes": {"items": None}})).names == []


def test_a_pod_without_annotations_or_owner_asks_for_nothing() -> None:
    plain = {"metadata": {"name": "p", "namespace": "d", "uid": "u", "annotations": None}}
    pod = read_extender_args(body(ARGS | {"Pod": plain})).pod
    assert (pod.request, pod.vmi, pod.vmi_uid) == ("", "", "")


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (ARGS | {"Pod": None}, "Pod is missing or null; an extender request carries the pod"),
        ({"NodeNames": ["n1"]}, "Pod is missing or null; an extender request carries the pod"),
        ({"Pod": POD}, "NodeNames and Nodes are both missing or null; one of them lists the nodes"),
        (
            ARGS | {"NodeNames": None},
            "NodeNames and Nodes are both missing or null; one of them lists the nodes",
        ),
        (ARGS | {"NodeNames": "n1"}, "nodenames is malformed: "),
        (ARGS | {"NodeNames": [1]}, "nodenames is malformed: "),
        (ARGS | {"Pod": "virt-launcher"}, "pod is malformed: "),
        (ARGS | {"Pod": {"metadata": {"name": 7}}}, "pod is malformed: "),
        (ARGS | {"Pod": {"metadata": None}}, "pod is malformed: "),
        (
            ARGS | {"Pod": {"metadata": {"uid": "u", "labels": ["placed"]}}},
            "pod.metadata.labels is malformed: ",
        ),
        (
            ARGS | {"Pod": {"metadata": {"name": "p", "namespace": "d"}}},
            "Pod.metadata.uid is missing or empty",
        ),
        ({"Pod": POD, "Nodes": {"items": ["n1"]}}, "Nodes.items is malformed: "),
        ({"Pod": POD, "Nodes": {"items": [{"metadata": {}}]}}, "Nodes.items contains a node without a name"),
        ([], "the body is not a JSON object: "),
        (None, "the body is not a JSON object: "),
    ],
    ids=repr,
)
def test_an_invalid_request_is_refused_with_its_key(sent: object, sentence: str) -> None:
    with pytest.raises(BadBody) as caught:
        read_extender_args(body(sent))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (BIND | {"Node": ""}, "node missing or empty; bind needs PodName, PodNamespace, PodUID and Node"),
        (
            BIND | {"Node": None, "PodUID": None},
            "poduid, node missing or empty; bind needs PodName, PodNamespace, PodUID and Node",
        ),
        ({}, "podname, podnamespace, poduid, node missing or empty; "),
        (BIND | {"PodName": 7}, "podname is malformed: "),
    ],
    ids=str,
)
def test_an_invalid_bind_is_refused_with_its_key(sent: object, sentence: str) -> None:
    with pytest.raises(BadBody) as caught:
        read_binding_args(body(sent))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("form", ["NodeNames", "Nodes"])
def test_more_nodes_than_any_cluster_has_are_refused(form: str) -> None:
    names = [f"n{number}" for number in range(MAX_NODES + 1)]
    nodes = {"items": [{"metadata": {"name": name}} for name in names]}
    sent = ARGS | ({"NodeNames": names} if form == "NodeNames" else {"NodeNames": None, "Nodes": nodes})
    with pytest.raises(BadBody, match="lists 20001 nodes, more than 20000"):
        read_extender_args(json.dumps(sent).encode())


def test_ten_megabytes_are_not_read() -> None:
    with pytest.raises(BadBody, match="bytes, more than 8388608; set nodeCacheCapable: true"):
        read_extender_args(body(ARGS | {"x": "y" * (10 << 20)}))
    assert MAX_BODY == 8 << 20


@given(
    st.binary(max_size=60)
    | json_values.map(body)
    | disturbed(ARGS).map(body)
    | disturbed(POD).map(lambda pod: body(ARGS | {"Pod": pod}))
    | disturbed(BIND).map(body)
)
def test_any_body_is_read_or_refused_with_one_sentence(sent: bytes) -> None:
    answer_or_sentence(read_extender_args, sent, BadBody)
    answer_or_sentence(read_binding_args, sent, BadBody)


@pytest.mark.parametrize(
    "sent",
    [
        *(text.encode() for text in DEEP_OR_LONG),
        b"\xff\xfe",
        b'{"Pod": {"metadata": {"name": "\\ud800"}}}',
        b"",
    ],
    ids=lambda sent: repr(sent[:12]),
)
def test_bodies_that_are_deep_long_or_no_text_are_not_a_crash(sent: bytes) -> None:
    for read in (read_extender_args, read_binding_args, read_preemption_args):
        with pytest.raises(BadBody):
            read(sent)


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"Pod": None},
        {"Pod": {"metadata": {"name": "without a UID"}}},
        {"Pod": {"metadata": {"uid": "u", "labels": {"kvplace.io/placed": True}}}},
        {"NodeNameToMetaVictims": {"n": {"Pods": [{}]}}},
        {"NodeNameToMetaVictims": {"n": {"Pods": [{"UID": ""}]}}},
        {"NodeNameToMetaVictims": {"n": {"Pods": [{"UID": 7}]}}},
        {"NodeNameToMetaVictims": {"n": []}},
        {"NodeNameToMetaVictims": []},
        {"NodeNameToVictims": {"n": {"Pods": [{"metadata": None}]}}},
        {"NodeNameToVictims": {"n": {"Pods": "all", "NumPDBViolations": 1}}},
        {"NodeNameToVictims": {"n": {"NumPDBViolations": "many"}}},
    ],
    ids=json.dumps,
)
def test_preempt_requests_without_pod_or_with_victims_that_are_none_are_refused(sent: dict[str, Any]) -> None:
    whole = {"Pod": {"metadata": {"uid": "u"}}} if "Pod" not in sent and sent else {}
    with pytest.raises(BadBody):
        read_preemption_args(json.dumps({**whole, **sent}).encode())


def test_answers_have_exactly_the_keys_that_kube_scheduler_decodes() -> None:
    assert json.loads(msgspec.json.encode(FilterResult(names=[]))) == {
        "NodeNames": [],
        "Nodes": None,
        "FailedAndUnresolvableNodes": {},
        "Error": "",
    }
    assert json.loads(msgspec.json.encode([HostPriority(NodeName("n1"), 7)])) == [{"Host": "n1", "Score": 7}]
    assert json.loads(msgspec.json.encode(BindingResult())) == {"Error": ""}
