"""Ledgers as the watch brings them, and as they are written: whole, or as a patch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given

from harness.control_plane.cluster import MERGE_PATCH
from kvplace.core.ledger import (
    Ledger,
    LedgerChange,
    OwnershipConflict,
    ledger_document,
    merge_patch,
    read_ledger,
)
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.custom_objects import ledger_record, write_ledger_call
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.objects import RawObject
from tests.kube.example_claims import claim, taking
from tests.kube.ledger_strategies import changes, ledgers
from tests.kube.worlds import LEDGERS_PATH, ApiWorld

Json = dict[str, Any]

FIRST: Json = {"namespace": "ns", "pod": "a", "policy": "exclusive", "cpus": "0-1", "owned": "0-1"}
SECOND: Json = {"namespace": "ns", "pod": "b", "policy": "exclusive", "cpus": "2", "owned": "2"}
OWNERS: Json = {"0": "u1", "1": "u1", "2": "u2"}


def record(spec: object) -> LedgerRecord:
    document = msgspec.json.encode({"metadata": {"name": "n", "resourceVersion": "7"}, "spec": spec})
    return ledger_record(msgspec.json.decode(document, type=RawObject))


def test_a_ledger_is_read_from_its_document() -> None:
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
def test_an_unreadable_ledger_is_the_problem_of_its_record(spec: object) -> None:
    found = record(spec)
    assert found.problem
    assert not found.ledger.claims


HELD = ledger_document(Ledger().after(taking(claim("a", 0, 1), claim("b", 2))))
FOREIGN_METADATA: list[Json] = [
    {"labels": {"owner": "me"}},
    {"annotations": {"owner": "me"}},
    {"finalizers": ["example.org/me"]},
    {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}]},
]


def read(spec: Json, metadata: Json | None = None) -> LedgerRecord:
    """The record of a ledger with this content."""
    about = {"name": "n", "resourceVersion": "7", "uid": "u", "generation": 3, "managedFields": [{}]}
    document = msgspec.json.encode({"metadata": {**about, **(metadata or {})}, "spec": spec})
    return ledger_record(msgspec.json.decode(document, type=RawObject))


@given(ledgers(), changes)
def test_a_ledger_that_kvplace_wrote_is_replaced_by_the_changed_ledger(
    ledger: Ledger, change: LedgerChange
) -> None:
    try:
        after = ledger.after(change)
    except OwnershipConflict:
        assume(False)
    call = write_ledger_call(read(ledger_document(ledger)), change, after)
    body = msgspec.json.decode(call.body or b"")
    assert call.verb == "update"
    assert body["metadata"]["resourceVersion"] == "7"
    assert read_ledger(body["spec"]) == after


def _with_claim(**fields: Any) -> Json:
    return {**HELD, "claims": {**HELD["claims"], "a": {**HELD["claims"]["a"], **fields}}}


@pytest.mark.parametrize(
    "spec",
    [
        _with_claim(colour="blue"),
        _with_claim(memory={"0": 1, "00": 2}),
        {**HELD, "later": {}},
        {**HELD, "summary": {**HELD["summary"], "later": 1}},
    ],
    ids=["field of a claim", "key of a claim", "field of the spec", "field of the summary"],
)
def test_a_ledger_with_content_that_kvplace_does_not_know_is_patched(spec: Json) -> None:
    record = read(spec)
    change = taking(claim("c", 5))
    assert not record.problem
    assert_is_patched(record, change)


@pytest.mark.parametrize("metadata", FOREIGN_METADATA, ids=lambda given: next(iter(given)))
def test_a_ledger_to_which_a_user_has_added_something_is_patched(metadata: Json) -> None:
    assert_is_patched(read(HELD, metadata), taking(claim("c", 5)))


def assert_is_patched(record: LedgerRecord, change: LedgerChange) -> None:
    call = write_ledger_call(record, change, record.ledger.after(change))
    spec = msgspec.json.decode(call.body or b"")["spec"]
    assert call.verb == "patch"
    assert {key: spec[key] for key in ("owners", "claims")} == merge_patch(record.ledger, change)


async def test_fields_that_a_user_has_added_to_a_ledger_stay_through_every_write(api_world: ApiWorld) -> None:
    node = api_world.named("labelled")
    made = await api_world.cluster.create_ledger(node)
    labelled = {"metadata": {"labels": {"owner": "me"}, "annotations": {"rack": "7"}}}
    path = f"{LEDGERS_PATH}/{node}"
    api_world.plane.request("PATCH", path, labelled, content_type=MERGE_PATCH)
    record = await api_world.cluster.read_ledger(NodeName(made.node))
    assert record is not None
    for number in range(3):
        record = await api_world.cluster.write_ledger(record, taking(claim(f"pod-{number}", number)))
    stored = api_world.plane.request("GET", path)
    assert stored["metadata"]["labels"] == {"owner": "me"}
    assert stored["metadata"]["annotations"] == {"rack": "7"}
    assert stored["spec"]["owners"] == {"0": "pod-0", "1": "pod-1", "2": "pod-2"}
