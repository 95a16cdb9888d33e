"""The reasons outside kvplace why a pod does not go to a node."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvplace.kube.node_filters import PodDemands, SchedulableNode, obstacle

READY = {"conditions": [{"type": "Ready", "status": "True"}]}


def why(node: dict[str, Any], demands: dict[str, Any] | None = None) -> str:
    full = {"metadata": {"name": "n1", "labels": {"rack": "a", "size": "8"}}, "status": READY, **node}
    return obstacle(msgspec.convert(full, SchedulableNode), msgspec.convert(demands or {}, PodDemands))


def affinity(*expressions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    terms = [{"matchExpressions": list(expressions), **fields}]
    return {
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        }
    }


def tainted(**taint: str) -> dict[str, Any]:
    return {"spec": {"taints": [taint]}}


def test_a_ready_node_takes_every_pod() -> None:
    assert why({}) == ""


def test_a_cordoned_node_takes_those_that_tolerate_it() -> None:
    cordoned = {"spec": {"unschedulable": True}}
    assert "cordoned" in why(cordoned)
    assert why(cordoned, {"tolerations": [{"operator": "Exists"}]}) == ""


@pytest.mark.parametrize("conditions", [[], [{"type": "Ready", "status": "Unknown"}]])
def test_a_node_that_is_not_ready_is_named_so_rather_than_by_its_taint(conditions: list[Any]) -> None:
    taints = [{"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}]
    assert why({"status": {"conditions": conditions}, "spec": {"taints": taints}}) == "the node is not Ready"


@pytest.mark.parametrize(
    ("toleration", "passes"),
    [
        ({"key": "gpu", "value": "yes"}, True),
        ({"key": "gpu", "operator": "Equal", "value": "no"}, False),
        ({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"operator": "Exists"}, True),
        ({"value": "yes"}, False),
    ],
)
def test_a_taint_keeps_away_whoever_does_not_tolerate_it(toleration: dict[str, str], passes: bool) -> None:
    node = tainted(key="gpu", value="yes", effect="NoSchedule")
    assert why(node) == "the taint gpu=yes:NoSchedule is not tolerated"
    assert (why(node, {"tolerations": [toleration]}) == "") is passes


def test_a_taint_that_only_prefers_keeps_no_client_away() -> None:
    assert why(tainted(key="old", effect="PreferNoSchedule")) == ""


def test_a_node_needs_every_label_of_the_selector() -> None:
    assert why({}, {"nodeSelector": {"rack": "a"}}) == ""
    assert why({}, {"nodeSelector": {"rack": "b"}}) == "the node does not have the label rack=b"


@pytest.mark.parametrize(
    ("operator", "values", "passes"),
    [
        ("In", ["8", "16"], True),
        ("In", ["16"], False),
        ("NotIn", ["16"], True),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
        ("Gt", ["7"], True),
        ("Lt", ["8"], False),
        ("Gt", ["many"], False),
        ("Near", ["8"], False),
    ],
)
def test_required_affinity_is_read_as_kube_scheduler_reads_it(
    operator: str, values: list[str], passes: bool
) -> None:
    demands = affinity({"key": "size", "operator": operator, "values": values})
    assert (why({}, demands) == "") is passes


def test_affinity_may_name_the_node_and_an_empty_term_selects_nothing() -> None:
    this = [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]
    other = [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]
    assert why({}, affinity(matchFields=this)) == ""
    assert "nodeAffinity" in why({}, affinity(matchFields=other))
    assert "nodeAffinity" in why({}, affinity())
