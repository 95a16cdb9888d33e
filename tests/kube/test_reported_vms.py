"""Pods of VMs as the API server writes them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvplace.core.well_known_names import PINNED
from kvplace.kube.api_errors import UnusableAnswer
from kvplace.kube.reported_vms import LAUNCHER_READER, LauncherPod, reported_vmi


@pytest.mark.parametrize(
    ("condition", "pinned_since", "unpinned", "was_pinned"),
    [
        ({"status": "True", "reason": "AsPlaced", "message": "good"}, 1.0, "", False),
        ({"status": "False", "reason": "ThreadsElsewhere", "message": "bad"}, None, "bad", False),
        ({"status": "False", "reason": "NotRunning", "message": "over"}, None, "over", True),
    ],
)
def test_the_condition_of_a_pod_is_read_from_the_report_of_the_agent(
    condition: dict[str, Any], pinned_since: float | None, unpinned: str, *, was_pinned: bool
) -> None:
    pod = read({"type": PINNED, "lastTransitionTime": "1970-01-01T00:00:01Z", **condition})
    assert (pod.pinned_since, pod.unpinned, pod.was_pinned) == (pinned_since, unpinned, was_pinned)


def read(condition: dict[str, Any]) -> LauncherPod:
    document = {"metadata": {"name": "pod", "uid": "1"}, "spec": {}, "status": {"conditions": [condition]}}
    return LAUNCHER_READER.record(msgspec.Raw(msgspec.json.encode(document)))


@pytest.mark.parametrize(
    "status",
    [
        {"phase": None},
        {"phaseTransitionTimestamps": [{"phase": "Running", "phaseTransitionTimestamp": "yesterday"}]},
    ],
)
def test_a_vmi_that_cannot_be_read_is_an_error_of_kvplace(status: dict[str, Any]) -> None:
    with pytest.raises(UnusableAnswer, match="virtualmachineinstances"):
        reported_vmi({"metadata": {"name": "db", "namespace": "shop", "uid": "u"}, "status": status})
