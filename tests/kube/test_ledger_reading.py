"""Ledgers as the watch brings them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvplace.core.ledger import read_ledger
from kvplace.core.scalars import PodUid
from kvplace.kube.custom_objects import ledger_record
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.objects import RawObject

Json = dict[str, Any]

FIRST: Json = {"namespace": "ns", "pod": "a", "policy": "exclusive", "cpus": "0-1", "owned": "0-1"}
SECOND: Json = {"namespace": "ns", "pod": "b", "policy": "exclusive", "cpus": "2", "owned": "2"}
OWNERS: Json = {"0": "u1", "1": "u1", "2": "u2"}


def record(spec: object) -> LedgerRecord:
    document = msgspec.json.encode({"metadata": {"name": "n", "resourceVersion": "7"}, "spec": spec})
    return ledger_record(msgspec.json.decode(document, type=RawObject))


def test_a_ledger_is_what_its_document_states() -> None:
    spec = {"owners": OWNERS, "claims": {"u1": FIRST, "u2": SECOND}, "summary": {"pods": 2}}
    assert record(spec).ledger == read_ledger(spec)


def test_a_claim_that_has_not_changed_is_not_read_again() -> None:
    before = record({"owners": {"0": "u1", "1": "u1"}, "claims": {"u1": FIRST}}).ledger
    after = record({"owners": OWNERS, "claims": {"u1": FIRST, "u2": SECOND}}).ledger
    assert after.claims[PodUid("u1")] is before.claims[PodUid("u1")]


def test_a_claim_that_has_changed_is_read_again() -> None:
    record({"owners": {"2": "u2"}, "claims": {"u2": SECOND}})
    changed = record({"owners": {"3": "u2"}, "claims": {"u2": {**SECOND, "cpus": "3", "owned": "3"}}}).ledger
    assert changed.claims[PodUid("u2")].owned == 1 << 3


@pytest.mark.parametrize("key", ["memory", "hugePages", "next", "reserved"])
def test_null_stands_for_nothing(key: str) -> None:
    assert record({"owners": {}, "claims": {"u1": {**FIRST, key: None}}}) == replace(
        record({"owners": {}, "claims": {"u1": FIRST}}), is_whole=key == "memory"
    )


def test_equal_claims_of_two_pods_are_distinguished() -> None:
    claims = record({"owners": {}, "claims": {"u1": FIRST, "u2": FIRST}}).ledger.claims
    assert [claim.uid for claim in claims.values()] == ["u1", "u2"]


@pytest.mark.parametrize(
    "spec",
    [
        {"owners": [], "claims": {}},
        {"owners": {}, "claims": []},
        {"owners": {}, "claims": {"u1": 3}},
        {"owners": {}, "claims": {"u1": {**FIRST, "owned": "x"}}},
        {"owners": {"x": "u1"}, "claims": {}},
        [],
    ],
    ids=str,
)
def test_what_cannot_be_read_is_the_problem_of_the_record(spec: object) -> None:
    found = record(spec)
    assert found.problem
    assert not found.ledger.claims
