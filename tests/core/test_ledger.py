"""The rules of a ledger: a CPU never changes hands in one write, and what was claimed can be given back."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.errors import Corrupt
from kvplace.core.ledger import (
    Claim,
    Ledger,
    LedgerChange,
    OwnershipConflict,
    claim_document,
    read_ledger,
)
from kvplace.core.request import Policy
from kvplace.core.scalars import Bytes, CpuId, CpuMask, PodUid
from tests.core.invalid_input import answer_or_sentence, disturbed, json_values

GIB = Bytes(1 << 30)


def claim_of(uid: str, owned: int, **others: Any) -> Claim:
    plain = Claim(
        uid=PodUid(uid),
        namespace="default",
        pod=f"pod-of-{uid}",
        vmi="",
        policy=Policy.EXCLUSIVE,
        cpus=CpuMask(owned),
        owned=CpuMask(owned),
        memory={},
        huge_pages={},
        since="2026-01-02T03:04:05Z",
    )
    return replace(plain, **others)


PODS = ("a", "b", "c", "d")
masks = st.integers(0, 0xFF)
claims = st.builds(
    lambda uid, cpus, owned: claim_of(uid, cpus & owned, cpus=cpus), st.sampled_from(PODS), masks, masks
)
changes = st.builds(
    lambda claims, releases: LedgerChange(tuple(claims), tuple(releases)),
    st.lists(claims, max_size=2),
    st.lists(st.sampled_from(PODS), max_size=2),
)


def grown(steps: list[LedgerChange]) -> Ledger:
    """The ledger after these changes, without the refused ones."""
    ledger = Ledger()
    for step in steps:
        with contextlib.suppress(OwnershipConflict):
            ledger = ledger.after(step)
    return ledger


ledgers = st.lists(changes, max_size=5).map(grown)


@given(ledgers, changes)
def test_no_cpu_ever_goes_from_one_pod_to_another_in_one_change(ledger: Ledger, change: LedgerChange) -> None:
    try:
        after = ledger.after(change)
    except OwnershipConflict:
        return
    for cpu in ledger.owners.keys() & after.owners.keys():
        assert ledger.owners[cpu] == after.owners[cpu]


@given(ledgers, changes)
def test_a_change_is_refused_only_for_a_cpu_that_another_pod_owns(
    ledger: Ledger, change: LedgerChange
) -> None:
    new = {claim.uid: claim for claim in change.claims}
    for claim in change.claims:
        others = [owned for uid, owned in _owned(ledger).items() if uid != claim.uid]
        others += [other.owned for other in new.values() if other.uid != claim.uid]
        if any(claim.owned & owned for owned in others):
            break
    else:
        assert ledger.after(change).claims.keys() == (
            ledger.claims.keys() - set(change.releases) | new.keys()
        )


@given(ledgers)
def test_owners_and_claims_report_the_same_story_after_any_changes(ledger: Ledger) -> None:
    ledger.check()
    assert ledger.owned == mask_of(cpu for claim in ledger.claims.values() for cpu in cpus_of(claim.owned))


@given(ledgers, claims)
def test_the_same_claim_twice_is_one_claim(ledger: Ledger, claim: Claim) -> None:
    try:
        once = ledger.after(LedgerChange((claim,)))
    except OwnershipConflict:
        return
    assert once.after(LedgerChange((claim,))) == once


@given(ledgers)
def test_when_all_pods_are_released_nothing_is_left(ledger: Ledger) -> None:
    after = ledger.after(LedgerChange(releases=tuple(ledger.claims)))
    assert after == Ledger()
    assert (after.owned, after.shared_use, after.plain_memory, after.huge_pages) == (0, {}, {}, {})


@given(ledgers, st.sampled_from(PODS))
def test_releasing_one_pod_leaves_the_others_as_they_are(ledger: Ledger, uid: str) -> None:
    after = ledger.after(LedgerChange(releases=(PodUid(uid),)))
    assert after.claims == {other: claim for other, claim in ledger.claims.items() if other != uid}
    assert after.owners == {cpu: owner for cpu, owner in ledger.owners.items() if owner != uid}


def test_a_core_that_is_released_and_claimed_in_one_change_is_refused_by_name() -> None:
    ledger = Ledger().after(LedgerChange((claim_of("a", 0b1100),)))
    with pytest.raises(OwnershipConflict) as caught:
        ledger.after(LedgerChange((claim_of("b", 0b1000),), releases=(PodUid("a"),)))
    assert str(caught.value) == "CPU 3 belongs to pod a and must be released before b owns it"


def test_a_change_that_is_refused_in_part_changes_nothing() -> None:
    ledger = Ledger().after(LedgerChange((claim_of("a", 0b0011),)))
    before = (dict(ledger.owners), dict(ledger.claims))
    with pytest.raises(OwnershipConflict):
        ledger.after(LedgerChange((claim_of("c", 0b1100), claim_of("b", 0b0110))))
    assert (dict(ledger.owners), dict(ledger.claims)) == before


def test_sharing_claims_own_nothing_and_are_counted_by_cpu() -> None:
    shared = [claim_of(uid, 0, cpus=0b0111, policy=Policy.SHARE) for uid in ("a", "b")]
    ledger = Ledger().after(LedgerChange((*shared, claim_of("c", 0b1000))))
    assert ledger.owners == {3: "c"}
    assert ledger.shared_use == {0: 2, 1: 2, 2: 2}


def test_memory_and_pages_of_all_claims_add_up_by_node() -> None:
    first = claim_of("a", 1, memory={0: 6 * GIB, 1: GIB}, huge_pages={0: {GIB: 4}})
    second = claim_of("b", 2, memory={0: GIB}, huge_pages={1: {GIB: 1, 1 << 21: 3}})
    ledger = Ledger().after(LedgerChange((first, second)))
    assert ledger.plain_memory == {0: 3 * GIB, 1: GIB}
    assert ledger.huge_pages == {(0, GIB): 4, (1, GIB): 1, (1, 1 << 21): 3}


@pytest.mark.parametrize("state", ["claimed", "bound"])
def test_a_claim_with_the_state_that_older_releases_wrote_is_read(state: str) -> None:
    claim = claim_of("a", 1)
    document = {**claim_document(claim), "state": state}
    assert read_ledger({"owners": {"0": "a"}, "claims": {"a": document}}).claims == {claim.uid: claim}


@pytest.mark.parametrize(
    ("ledger", "sentence"),
    [
        (Ledger({}, {PodUid("a"): claim_of("a", 0b11)}), "a claims CPU '0-1' but owns ''"),
        (
            Ledger({CpuId(0): PodUid("a"), CpuId(2): PodUid("a")}, {PodUid("a"): claim_of("a", 1)}),
            "a claims CPU '0' but owns '0,2'",
        ),
        (Ledger({CpuId(5): PodUid("ghost")}, {}), "CPUs are owned by pods without a claim: ghost"),
    ],
    ids=["owns too little", "owns too much", "a stranger"],
)
def test_a_ledger_that_contradicts_itself_is_corrupt(ledger: Ledger, sentence: str) -> None:
    with pytest.raises(Corrupt) as caught:
        ledger.check()
    assert str(caught.value) == sentence


SPEC: dict[str, Any] = {
    "owners": {"2": "a", "34": "a"},
    "claims": {
        "a": claim_document(
            claim_of("a", 1 << 2 | 1 << 34, memory={0: 8 * GIB}, huge_pages={0: {GIB: 8}}, vmi="db")
        )
    },
}


@given(
    json_values
    | disturbed(SPEC)
    | disturbed(SPEC["claims"]["a"]).map(lambda claim: SPEC | {"claims": {"a": claim}})
    | st.dictionaries(
        st.sampled_from(["2", "-1", "x", "99999999999", "1_0", " 3", "٣"]), st.text(max_size=3)
    ).map(lambda owners: SPEC | {"owners": owners})
)
def test_any_stored_content_is_a_ledger_that_can_be_used_or_one_sentence(spec: Any) -> None:
    ledger, _ = answer_or_sentence(read_ledger, spec, Corrupt)
    if ledger is not None:
        assert ledger.owned.bit_length() <= 16384
        assert all(count >= 0 for count in ledger.plain_memory.values())
        assert ledger.shared_use is not None
        assert ledger.huge_pages is not None


@pytest.mark.parametrize(
    "change",
    [
        {"memory": {"0": 1e999}},
        {"memory": {"0": -1}},
        {"memory": {"-1": 5}},
        {"hugePages": {"0": {"1Gi": 1.5}}},
        {"hugePages": {"0": {"1Gi": 1, "1024Mi": 1}}},
        {"cpus": "3-1"},
        {"policy": "mine"},
        {"revision": None},
        {"revision": 0},
        {"namespace": 7},
        {"pod": None},
        {"vmi": ["x"]},
        {"since": 5},
    ],
    ids=str,
)
def test_a_claim_that_its_schema_forbids_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match=r"^the claim of pod a cannot be read: "):
        read_ledger(SPEC | {"claims": {"a": SPEC["claims"]["a"] | change}})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"claims": {"a": 5}}, "it is 5; it must be an object"),
        (
            {"claims": {"a": {"namespace": "n", "pod": "p"}}},
            "policy is missing; it must be one of exclusive, share, ",
        ),
        (
            {"claims": {"a": SPEC["claims"]["a"] | {"revision": "2"}}},
            "revision is '2'; it must be a whole number from 1 to ",
        ),
        ({"claims": {"a": SPEC["claims"]["a"] | {"memory": [1]}}}, "memory is [1]; it must be an object"),
        ({"claims": [1]}, "claims is [1]; it must be an object"),
        ([], "spec is []; it must be an object"),
    ],
)
def test_a_fault_in_a_ledger_is_reported_in_the_words_of_the_document(spec: Any, words: str) -> None:
    with pytest.raises(Corrupt) as error:
        read_ledger(spec)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "owners",
    [{"-1": "a"}, {"99999999999": "a"}, {"16384": "a"}, {"016383": "a"}, {"2": 7}, {"x": "a"}, ["a"]],
    ids=str,
)
def test_owners_that_their_schema_forbids_are_named(owners: Any) -> None:
    with pytest.raises(Corrupt, match=r"^owners "):
        read_ledger(SPEC | {"owners": owners})


def test_empty_fields_of_a_claim_are_not_written() -> None:
    assert claim_document(claim_of("a", 0, since="")) == {
        "namespace": "default",
        "pod": "pod-of-a",
        "policy": "exclusive",
    }


def test_the_largest_cpu_id_can_be_owned() -> None:
    assert read_ledger({"owners": {"16383": "a"}, "claims": {}}).owners == {16383: "a"}


def _owned(ledger: Ledger) -> dict[str, int]:
    return {uid: claim.owned for uid, claim in ledger.claims.items()}
