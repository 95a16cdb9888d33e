"""The fingerprint of pods equals the one that its Go library computes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplace.agent.node_report import pod_fingerprint
from tests.captured import captured_folder


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((captured_folder("tables") / "podfingerprint.json").read_text())
    return found


def test_published_and_derived_fingerprints_are_reproduced(table: dict[str, Any]) -> None:
    pods = table["pods"]
    named = {"@pods": pods, "@pods_reversed": pods[::-1]}
    for case in table["cases"]:
        given = case["pods"] if isinstance(case["pods"], list) else named[case["pods"]]
        assert pod_fingerprint((namespace, name) for namespace, name in given) == case["expect"]
