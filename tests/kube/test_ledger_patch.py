"""A change as a merge patch does to the stored JSON what `Ledger.after` does to the value."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, example, given

from kvplace.core.ledger import (
    Claim,
    Ledger,
    LedgerChange,
    OwnershipConflict,
    ledger_document,
    merge_patch,
    read_ledger,
)
from kvplace.core.request import Policy
from kvplace.core.scalars import Bytes, CpuMask, NumaId, PodUid
from tests.kube.example_claims import claim, taking
from tests.kube.ledger_strategies import changes, claims, ledgers, merged


def claim_on(memory: dict[int, int], huge_pages: dict[int, dict[int, int]]) -> Claim:
    return Claim(
        PodUid("pod-a"),
        "default",
        "a",
        "vm",
        Policy.EXCLUSIVE,
        CpuMask(3),
        CpuMask(3),
        {NumaId(node): Bytes(count) for node, count in memory.items()},
        {NumaId(node): {Bytes(size): n for size, n in of.items()} for node, of in huge_pages.items()},
        "",
    )


A, B = PodUid("a"), PodUid("b")
BOTH = Ledger().after(taking(claim("a", 0, 1), claim("b", 2, 3)))


@given(ledgers(), changes)
@example(BOTH, LedgerChange(releases=(A, B)))
@example(BOTH, LedgerChange((claim("a", 1, 4),), releases=(A,)))
@example(BOTH, LedgerChange((claim("a", 0, 1),), releases=(A,)))
@example(BOTH, LedgerChange((claim("c", 5),), releases=(A,)))
@example(BOTH, taking(claim("a", 1), claim("b", 2, 4)))
@example(BOTH, taking(claim("a", 0, 4), claim("a", 1, 5)))
@example(
    Ledger({}, {PodUid("pod-a"): claim_on({0: 5}, {0: {1 << 30: 1}})}), LedgerChange((claim_on({1: 5}, {}),))
)
def test_a_merge_patch_stores_the_change(ledger: Ledger, change: LedgerChange) -> None:
    try:
        after = ledger.after(change)
    except OwnershipConflict:
        assume(False)
    assert read_ledger(merged(ledger_document(ledger), merge_patch(ledger, change))) == after


@given(ledgers(), changes)
def test_a_merge_patch_names_only_differences(ledger: Ledger, change: LedgerChange) -> None:
    before = ledger_document(ledger)
    patch = merge_patch(ledger, change)
    for part in ("owners", "claims"):
        for key, value in patch[part].items():
            assert merged(before[part].get(key), value) != before[part].get(key) or value is None
            assert value is not None or key in before[part]


@given(ledgers(), claims())
def test_a_claim_survives_being_written_and_read(ledger: Ledger, claim: Claim) -> None:
    assert read_ledger(ledger_document(Ledger(ledger.owners, {claim.uid: claim}))).claims == {
        claim.uid: claim
    }


def test_a_claim_that_changes_travels_as_the_difference_alone() -> None:
    claim = claim_on({0: 1 << 33}, {})
    ledger = Ledger().after(LedgerChange((claim,)))
    assert merge_patch(ledger, LedgerChange((replace(claim, revision=2),))) == {
        "owners": {},
        "claims": {"pod-a": {"revision": 2}},
    }
