"""A running VMI that cannot migrate now, and the nodes that its new pod would not be scheduled on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvplace.kube.node_filters import RunningVmi, SchedulableNode

READY = {"conditions": [{"type": "Ready", "status": "True"}]}
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
