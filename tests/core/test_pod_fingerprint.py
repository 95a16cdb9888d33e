"""The fingerprint of pods equals the one that its Go library computes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplace.core.pod_fingerprint import pod_fingerprint, xxh64
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


@pytest.mark.parametrize(
    ("content", "seed", "expected"),
    [
        (b"", 0, 0xEF46DB3751D8E999),
        (b"a", 0, 0xD24EC4F1A98C6E5B),
        (b"abc", 0, 0x44BC2CF5AD770999),
        (b"xxhash", 20141025, 0xB559B98D844E0635),
        (b"I want an unsigned 64-bit seed!", 0, 0xD4CB0A70A2B8C7C1),
        (b"I want an unsigned 64-bit seed!", 1, 0xCE5087F12470D961),
        (b"Nobody inspects the spammish repetition", 0, 0xFBCEA83C8A378BF1),
    ],
)
def test_published_vectors_of_xxh64_are_reproduced(content: bytes, seed: int, expected: int) -> None:
    assert xxh64(content, seed) == expected
