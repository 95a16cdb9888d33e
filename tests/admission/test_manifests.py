"""The words in the manifests are the words in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kvplace.admission.http import admission_application
from kvplace.admission.pod import FORGEABLE
from kvplace.core.well_known_names import (
    ASKING,
    CPU_MAP,
    MARKER_RESOURCE,
    OPTED_IN_LABEL,
    PLACED_LABEL,
    PREFIX,
)
from tests.admission.reviewed_objects import SETTINGS, Json, Vmis

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
QUOTED = re.compile(r"'([^']*)'")
KEY = re.compile(r"'(kvplace\.io/[^']+|cpu-map)'")


def documents(path: str) -> list[Json]:
    return list(yaml.safe_load_all((MANIFESTS / path).read_text()))


def webhooks() -> dict[str, Json]:
    (mutating,) = documents("admission/mutating-webhooks.yaml")
    (validating,) = documents("admission/validating-webhooks.yaml")
    return {entry["name"]: entry for entry in mutating["webhooks"] + validating["webhooks"]}


def condition(webhook: str, name: str) -> str:
    (found,) = [entry for entry in webhooks()[webhook]["matchConditions"] if entry["name"] == name]
    expression: str = found["expression"]
    return expression


@pytest.mark.parametrize(
    ("webhook", "name", "times"),
    [
        ("vmi.kvplace.io", "asks", 1),
        ("vmi-edit.kvplace.io", "edits", 1),
        ("pod.kvplace.io", "asks", 1),
        ("vm.kvplace.io", "asks", 2),
        ("vm.kvplace.io", "differs", 1),
    ],
)
def test_an_object_is_sent_here_for_every_key_by_which_one_can_ask(
    webhook: str, name: str, times: int
) -> None:
    named = [word for word in QUOTED.findall(condition(webhook, name)) if word != OPTED_IN_LABEL]
    expected = [PREFIX, *(key for key in ASKING if not key.startswith(PREFIX))]
    assert sorted(named) == sorted(expected * times)
    assert all(key.startswith(PREFIX) for key in FORGEABLE)


def test_the_webhooks_go_to_the_addresses_that_are_served() -> None:
    application = admission_application(Vmis(), SETTINGS, lambda: None)
    served = {resource.canonical for resource in application.router.resources()}
    assert {entry["clientConfig"]["service"]["path"] for entry in webhooks().values()} == served


def test_a_webhook_that_does_not_answer_blocks_objects_with_options_only() -> None:
    for entry in webhooks().values():
        assert entry["failurePolicy"] == "Fail"
        asks = any(condition["name"] == "asks" for condition in entry.get("matchConditions", ()))
        chosen = entry.get("objectSelector", {}).get("matchExpressions")
        assert asks or chosen == [{"key": OPTED_IN_LABEL, "operator": "Exists"}]
        assert entry["sideEffects"] == "None"
        assert 0 < entry["timeoutSeconds"] <= 10


def test_a_new_pod_is_sent_by_its_label_or_by_its_annotations_never_twice() -> None:
    chosen = {
        name: entry["objectSelector"]["matchExpressions"]
        for name, entry in webhooks().items()
        if entry["rules"][0]["resources"] == ["pods"]
    }
    assert chosen == {
        "vm-pod.kvplace.io": [{"key": OPTED_IN_LABEL, "operator": "Exists"}],
        "pod.kvplace.io": [{"key": OPTED_IN_LABEL, "operator": "DoesNotExist"}],
    }


def test_the_policy_freezes_exactly_the_results_and_the_label() -> None:
    policy = next(
        entry
        for entry in documents("policy/pod-results.yaml")
        if entry["kind"] == "ValidatingAdmissionPolicy"
    )
    text = " ".join(
        entry["expression"] for entry in policy["spec"]["variables"] + policy["spec"]["validations"]
    )
    conditions = {"kvplace.io/Pinned", "kvplace.io/Relocated"}
    assert set(KEY.findall(text)) - conditions == {*FORGEABLE, CPU_MAP, PLACED_LABEL}


def test_the_scheduler_calls_the_extender_for_the_marker_that_pods_get() -> None:
    (configuration,) = documents("scheduler/configuration.yaml")
    (extender,) = configuration["extenders"]
    assert extender["managedResources"] == [{"name": MARKER_RESOURCE, "ignoredByScheduler": True}]
