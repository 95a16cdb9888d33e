"""The reasons outside kvplace why a pod does not go to a node."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvplace.kube.node_filters import PodDemands, RunningVmi, SchedulableNode, obstacle

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


HOST_MODEL = "host-model-cpu.node.kubevirt.io/"
FEATURE = "host-model-required-features.node.kubevirt.io/"
MODEL_THERE = "cpu-model-migration.node.kubevirt.io/"
FEATURE_THERE = "cpu-feature.node.kubevirt.io/"
VENDOR = "cpu-vendor.node.kubevirt.io/"
SCHEDULABLE = {"kubevirt.io/schedulable": "true"}


def node(name: str, **labels: str) -> SchedulableNode:
    document = {"metadata": {"name": name, "labels": {**SCHEDULABLE, **labels}}, "status": READY}
    return msgspec.convert(document, SchedulableNode)


def vmi(*conditions: dict[str, str], model: str = "", **status: Any) -> RunningVmi:
    migratable = {"type": "LiveMigratable", "status": "True"}
    document = {
        "metadata": {"name": "db", "namespace": "shop", "uid": "u"},
        "spec": {"domain": {"cpu": {"model": model}}},
        "status": {"phase": "Running", "conditions": [migratable, *conditions], **status},
    }
    return msgspec.convert(document, RunningVmi)


def labels(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "true")


SOURCE = labels(f"{HOST_MODEL}Haswell", f"{FEATURE}vmx", f"{VENDOR}Intel")
LIKE_SOURCE = labels(f"{MODEL_THERE}Haswell", f"{FEATURE_THERE}vmx", f"{VENDOR}Intel")


@pytest.mark.parametrize("missing", sorted(LIKE_SOURCE))
def test_a_vm_of_the_model_of_its_host_goes_only_where_model_features_and_vendor_are(missing: str) -> None:
    source = node("a", **SOURCE)
    assert vmi().obstacle_on(node("b", **LIKE_SOURCE), source) == ""
    lacking = {label: value for label, value in LIKE_SOURCE.items() if label != missing}
    reason = f"the node does not have the label {missing}=true"
    assert vmi().obstacle_on(node("b", **lacking), source) == reason
    assert vmi(model="host-model").obstacle_on(node("b", **lacking), source) == reason


def test_a_vm_of_a_named_model_needs_the_vendor_of_its_source_alone() -> None:
    source = node("a", **SOURCE)
    assert vmi(model="Nehalem").obstacle_on(node("b", **labels(f"{VENDOR}Intel")), source) == ""
    assert "Intel=true" in vmi(model="Nehalem").obstacle_on(node("b", **labels(f"{VENDOR}AMD")), source)


def test_labels_of_a_second_cluster_bar_a_vm_only_from_nodes_without_those_of_its_source() -> None:
    """A node that was in another cluster before may keep its labels: two models and two vendors."""
    left_over = labels(
        *(f"{FEATURE_THERE}f{number}" for number in range(300)),
        f"{HOST_MODEL}EPYC",
        f"{MODEL_THERE}EPYC",
        f"{VENDOR}AMD",
    )
    old, new = node("a", **SOURCE, **left_over), node("b", **LIKE_SOURCE)
    assert vmi().obstacle_on(node("b", **LIKE_SOURCE, **left_over), old) == ""
    assert vmi().obstacle_on(node("b", **LIKE_SOURCE, **left_over), node("a", **SOURCE)) == ""
    assert vmi().obstacle_on(new, old) in {
        f"the node does not have the label {label}=true" for label in (f"{MODEL_THERE}EPYC", f"{VENDOR}AMD")
    }


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (vmi(), ""),
        (vmi(phase="Scheduled"), "it does not run"),
        (vmi(conditions=[]), "it is not LiveMigratable (no reason is given)"),
        (
            vmi(
                conditions=[
                    {"type": "LiveMigratable", "status": "False", "reason": "HostDeviceNotLiveMigratable"}
                ]
            ),
            "it is not LiveMigratable (HostDeviceNotLiveMigratable)",
        ),
        (
            vmi({"type": "HotVCPUChange", "status": "True"}),
            "KubeVirt is about to migrate it (HotVCPUChange)",
        ),
        (vmi(migrationState={"completed": False}), "it migrates already"),
        (vmi(migrationState={"failed": True}), ""),
    ],
)
def test_a_vm_that_cannot_migrate_now_has_a_reason(changed: RunningVmi, why: str) -> None:
    assert changed.obstacle == why
    assert changed.has_just_started == (why == "it is not LiveMigratable (no reason is given)")
