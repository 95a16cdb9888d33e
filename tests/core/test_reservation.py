"""A reservation owns what is free, waits for the rest, and leaves neither to any other client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.claim_changes import grown, reserve, reserve_for_migration, reserved_for_target
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import (
    Claim,
    Ledger,
    LedgerChange,
    Reserved,
    claim_document,
    merge_patch,
    read_ledger,
)
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, CpuMask, PodUid
from kvplace.kube.ledgers import decide_together
from tests.core.claims import claim
from tests.nodes.machines import TWO

UNTIL = "2026-01-02T03:05:00Z"
A, B, C = map(PodUid, "abc")
masks = st.integers(0, 0xFF).map(CpuMask)


def ledger_of(*claims: Claim) -> Ledger:
    return Ledger().after(LedgerChange(claims=claims))


def reserved(ledger: Ledger, owned: int, *, but: int = 0) -> Ledger:
    """The ledger in which CPUs are reserved for pod c."""
    kept = reserve(ledger, claim("c", owned), but=CpuMask(but), until=UNTIL)
    return ledger.after(LedgerChange(claims=(kept,)))


@given(owned=masks, wanted=masks, but=masks)
def test_what_is_free_is_owned_at_once_and_the_rest_goes_to_no_other_pod(
    owned: CpuMask, wanted: CpuMask, but: CpuMask
) -> None:
    ledger = reserved(ledger_of(claim("a", owned)), wanted, but=but)
    kept = ledger.claims[C]
    assert kept.owned == wanted & ~but & ~owned
    assert kept.still_in_use == wanted & ~but & owned
    left = ledger.after(LedgerChange(releases=(A,)))
    for stored in (ledger, left):
        free = free_of(TWO, stored)
        assert not (free.cpus | free.pool) & wanted & ~but
    ledger.check()


def test_what_others_leave_becomes_its_own_and_what_they_name_does_not() -> None:
    sharer = claim("b", 0b1000, 0, Policy.SHARE)
    ledger = reserved(ledger_of(claim("a", 0b0110), sharer), 0b1111)
    assert list(grown(ledger)) == []
    (kept,) = grown(ledger.after(LedgerChange(releases=(A,))))
    assert (kept.owned, kept.cpus, kept.still_in_use) == (0b0111, 0b0111, 0b1000)
    (kept,) = grown(ledger.after(LedgerChange(releases=(A, B))))
    assert kept.owned == 0b1111
    assert kept.reserved == ledger.claims[C].reserved


def test_a_later_call_reserves_what_others_passed_before_and_keeps_what_is_owned() -> None:
    ledger = reserved(ledger_of(claim("a", 0b0011)), 0b1111, but=0b0100)
    assert ledger.claims[C].owned == 0b1000
    assert free_of(TWO, ledger).cpus & 0b0100
    ledger = reserved(ledger, 0b1111)
    assert (ledger.claims[C].owned, ledger.claims[C].still_in_use) == (0b1100, 0b0011)


def test_what_is_reserved_and_shared_is_named_from_the_beginning() -> None:
    whole = claim("c", 0b11, 0, Policy.SHARE)
    kept = reserve(ledger_of(claim("a", 0b10)), whole, but=NO_CPUS, until=UNTIL)
    assert (kept.cpus, kept.owned, kept.still_in_use) == (0b11, 0, 0)


@given(owned=masks, wanted=masks, left=masks)
def test_it_is_stored_and_read_again_at_every_stage(owned: CpuMask, wanted: CpuMask, left: CpuMask) -> None:
    before = ledger_of(claim("a", owned))
    stages = [reserved(before, wanted)]
    stages.append(stages[-1].after(LedgerChange(claims=(claim("a", owned & left),))))
    stages.append(stages[-1].after(LedgerChange(claims=tuple(grown(stages[-1])))))
    stages.append(stages[-1].after(LedgerChange(claims=(replace(stages[-1].claims[C], reserved=None),))))
    stored = document_of(before)
    for one, following in zip([before, *stages], stages, strict=False):
        change = LedgerChange(claims=tuple(following.claims.values()))
        stored = merged(stored, merge_patch(one, change))
        assert read_ledger(stored) == following
    assert "reserved" not in stored["claims"]["c"]


def document_of(ledger: Ledger) -> dict[str, Any]:
    return {
        "owners": {str(cpu): uid for uid, claim in ledger.claims.items() for cpu in cpus_of(claim.owned)},
        "claims": {uid: claim_document(claim) for uid, claim in ledger.claims.items()},
    }


def merged(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch."""
    result = {key: value for key, value in document.items() if patch.get(key, "") is not None}
    for key, value in patch.items():
        if isinstance(value, dict):
            result[key] = merged(result.get(key, {}), value)
        elif value is not None:
            result[key] = value
    return result


@given(wanted=masks)
def test_what_a_migration_needs_on_its_target_is_taken_and_has_no_owner_until_its_pod_is_bound(
    wanted: CpuMask,
) -> None:
    whole = claim("vmi", wanted)
    kept = reserve_for_migration(whole, "move-1", until=UNTIL)
    ledger = ledger_of(kept)
    assert (kept.owned, kept.cpus) == (0, 0)
    assert not free_of(TWO, ledger).pool & wanted
    assert not decide_together(ledger, []).change  # it does not grow
    assert read_ledger(document_of(ledger)) == ledger
    ledger.check()

    found = reserved_for_target(ledger, "vmi", "move-1")
    assert found == whole
    bound = ledger.after(LedgerChange(claims=(replace(found, uid=C, pod="target"),), releases=(kept.uid,)))
    assert set(bound.claims) == {C}
    assert bound.owned == wanted
    bound.check()


def test_a_migrations_reservation_is_for_its_own_pod_and_for_none_where_an_older_release_let_it_grow() -> (
    None
):
    kept = reserve_for_migration(claim("vmi", 0b11), "move-1", until=UNTIL)
    ledger = ledger_of(kept)
    assert reserved_for_target(ledger, "vmi", "move-2") is None
    assert reserved_for_target(ledger, "other", "move-1") is None
    assert reserved_for_target(reserved(ledger_of(), 0b11), "c", "") is None
    grown_by_older = ledger_of(replace(kept, cpus=CpuMask(0b11), owned=CpuMask(0b11)))
    assert reserved_for_target(grown_by_older, "vmi", "move-1") is None


def test_a_vm_that_shares_its_cpus_keeps_them_from_exclusive_vms_while_its_pod_is_awaited() -> None:
    whole = claim("vmi", 0b11, 0, Policy.SHARE)
    ledger = ledger_of(reserve_for_migration(whole, "move-1", until=UNTIL))
    assert not free_of(TWO, ledger).cpus & 0b11
    assert free_of(TWO, ledger).pool & 0b11 == 0b11
    assert reserved_for_target(ledger, "vmi", "move-1") == whole


def test_of_two_reservations_of_one_cpu_the_first_one_gets_it_and_the_ledger_can_be_written() -> None:
    twice = [replace(claim(uid, 0), reserved=Reserved(CpuMask(0b11), UNTIL)) for uid in "bc"]
    batch = decide_together(ledger_of(*twice), [])
    assert [(one.uid, one.owned) for one in batch.change.claims] == [(B, 0b11)]


def test_a_reservation_that_states_to_own_anothers_cpu_gets_nothing_and_the_ledger_can_be_written() -> None:
    """Written by hand: the API server compares owners only with the owners before."""
    odd = replace(claim("c", 0b01), reserved=Reserved(CpuMask(0b11), UNTIL))
    owned_by_a = ledger_of(claim("a", 0b01))
    ledger = Ledger(owned_by_a.owners, {**owned_by_a.claims, C: odd})
    assert not decide_together(ledger, []).change
    left = ledger.after(LedgerChange(releases=(C,)))
    assert (left.owners, list(left.claims)) == (owned_by_a.owners, [A])
