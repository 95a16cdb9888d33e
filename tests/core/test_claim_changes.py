"""A relocating claim holds its old and new cores; a reservation owns what is free and waits for the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.claim_changes import (
    claim_after_relocation,
    claim_while_relocating,
    claim_with_lost_relocation,
    grown,
    held_by_others,
    reserve,
    reserve_for_migration,
    reserved_for_target,
    way_back,
)
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import (
    Claim,
    Ledger,
    LedgerChange,
    Relocation,
    Reserved,
    claim_document,
    claim_of,
    merge_patch,
    read_ledger,
)
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, PinningOptions, Policy
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NodeName, NumaId, PodUid
from kvplace.kube.ledgers import decide_together
from tests.core.example_ledgers import claim
from tests.nodes.machines import TWO

UID = PodUid("0b7a5f5e-0000-4000-8000-000000000001")
GIB = Bytes(1 << 30)


def placed(cpus: int, *, revision: int = 1, policy: Policy = Policy.EXCLUSIVE, **memory: int) -> PodPlacement:
    owned = CpuMask(cpus if policy is Policy.EXCLUSIVE else 0)
    vcpus = tuple(CpuId(cpu) for cpu in range(cpus.bit_length()) if cpus >> cpu & 1)
    decided = Placement(
        policy,
        vcpus,
        CpuMask(cpus),
        owned=owned,
        memory={NumaId(int(node[1:])): count * GIB for node, count in memory.items()},
    )
    return PodPlacement(UID, NodeName("n1"), "f", OnFailure.WAIT, decided, revision=revision)


def claimed(bound: PodPlacement) -> Claim:
    return claim_of(UID, bound.placement, namespace="vms", pod="virt-launcher-a", vmi="a", since="2026-01-02")


OLD, NEW = placed(0b0011, m0=2), placed(0b1100, revision=2, m0=1, m1=1)


def test_it_owns_the_cores_of_both_placements_and_the_memory_that_both_need() -> None:
    claim = claim_while_relocating(claimed(OLD), Relocation(NEW, OLD))
    assert claim.owned == claim.cpus == 0b1111
    assert claim.memory == {0: 2 * GIB, 1: GIB}


def test_after_a_relocation_the_claim_equals_that_of_a_bind_with_the_new_placement() -> None:
    moving = claim_while_relocating(claimed(OLD), Relocation(NEW, OLD))
    after = claim_after_relocation(moving, NEW)
    assert after is not None
    assert after == replace(claimed(NEW), revision=2)


def test_cpus_that_it_will_share_are_given_to_no_vm_meanwhile_although_its_old_pool_could_shrink() -> None:
    pool, shared = placed(0b1111, policy=Policy.NUMA), placed(0b0011, revision=2, policy=Policy.SHARE)
    for relocation in (Relocation(shared, pool), Relocation(pool, shared)):
        claim = claim_while_relocating(claimed(relocation.previous or pool), relocation)
        ledger = Ledger().after(LedgerChange(claims=(claim,)))
        assert ledger.named & 0b0011 == 0b0011
        assert way_back(claim, relocation.next).policy is not Policy.NUMA


def test_a_pod_that_is_no_longer_pinned_holds_nothing_afterwards() -> None:
    floating = replace(PodPlacement.floating(pod_uid=UID, node=NodeName("n1")), revision=2)
    moving = claim_while_relocating(claimed(OLD), Relocation(floating, OLD))
    assert moving.owned == 0b0011
    assert claim_after_relocation(moving, floating) is None


def test_the_way_back_is_one_more_revision_that_answers_the_same_options_and_gives_nothing_up() -> None:
    asked = PinningOptions(policy=Policy.SHARE)
    moving = claim_while_relocating(claimed(OLD), Relocation(NEW, OLD))
    back = way_back(moving, replace(NEW, options=asked))
    assert (back.owned, back.memory) == (moving.owned, moving.memory)
    assert back.relocation is not None
    assert back.relocation.next == replace(OLD, revision=3, options=asked)
    assert claim_after_relocation(back, OLD) == claimed(OLD)


def test_a_lost_relocation_is_restored_with_the_cpus_that_others_left_in_the_old_pool() -> None:
    pool, shared = placed(0b1111, policy=Policy.NUMA), placed(0b0010, revision=2, policy=Policy.SHARE)
    other = claim_of(PodUid("other"), placed(0b1000).placement)
    ledger = Ledger().after(LedgerChange(claims=(other, claimed(shared))))
    found = claim_with_lost_relocation(ledger, claimed(shared), Relocation(shared, pool))
    assert (found.cpus, held_by_others(ledger, found)) == (0b0111, 0)
    named = replace(claimed(placed(0b1000)), uid=UID)
    assert held_by_others(ledger, named) == 0b1000


def test_a_lost_relocation_to_a_pool_is_restored_with_the_cpus_that_others_left_in_it() -> None:
    pool = placed(0b1111, revision=2, policy=Policy.NUMA)
    other = replace(claimed(placed(0b1000)), uid=PodUid("other"))
    ledger = Ledger().after(LedgerChange(claims=(other, claimed(pool))))
    found = claim_with_lost_relocation(ledger, claimed(pool), Relocation(pool, OLD))
    assert (found.cpus, found.owned) == (0b0111, 0b0011)
    assert not held_by_others(ledger, found)


def test_a_pod_that_had_no_placement_goes_back_to_running_unpinned() -> None:
    first = placed(0b11)
    back = way_back(claim_while_relocating(claimed(placed(0)), Relocation(first, None)), first)
    assert back.relocation is not None
    assert back.relocation.next.placement.floats
    assert back.relocation.next.revision == 2


masks = st.integers(1, 0xFF)


@given(masks, masks, st.sampled_from(Policy), st.sampled_from(Policy))
def test_a_ledger_reads_a_relocating_claim_as_it_wrote_it(
    old: int, new: int, before: Policy, after: Policy
) -> None:
    first, second = placed(old, policy=before), placed(new, policy=after, revision=2)
    moving = claim_while_relocating(claimed(first), Relocation(second, first))
    ledger = Ledger().after(LedgerChange(claims=(moving,)))
    ledger.check()
    owners = {str(cpu): uid for cpu, uid in ledger.owners.items()}
    assert read_ledger({"owners": owners, "claims": {UID: claim_document(moving)}}) == ledger


@given(masks, masks)
def test_no_other_pod_gets_a_core_of_either_placement_before_it_has_ended(old: int, new: int) -> None:
    first, second = placed(old), placed(new, revision=2)
    ledger = Ledger().after(LedgerChange(claims=(claimed(first),)))
    relocating = claim_while_relocating(ledger.claims[UID], Relocation(second, first))
    moving = ledger.after(LedgerChange(claims=(relocating,)))
    assert moving.owned == old | new
    assert moving.after(LedgerChange(claims=(way_back(relocating, second),))).owned == old | new
    settled = claim_after_relocation(relocating, second)
    assert settled is not None
    assert moving.after(LedgerChange(claims=(settled,))).owned == new


UNTIL = "2026-01-02T03:05:00Z"
A, B, C = map(PodUid, "abc")
cpu_masks = st.integers(0, 0xFF).map(CpuMask)


def ledger_of(*claims: Claim) -> Ledger:
    return Ledger().after(LedgerChange(claims=claims))


def reserved(ledger: Ledger, owned: int, *, but: int = 0) -> Ledger:
    """Return the ledger after a reservation for pod c."""
    kept = reserve(ledger, claim("c", owned), but=CpuMask(but), until=UNTIL)
    return ledger.after(LedgerChange(claims=(kept,)))


@given(owned=cpu_masks, wanted=cpu_masks, but=cpu_masks)
def test_a_reservation_owns_free_cpus_at_once_and_the_rest_goes_to_no_other_pod(
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


def test_a_reservation_owns_cpus_that_others_release_and_not_those_that_others_name() -> None:
    sharer = claim("b", 0b1000, 0, Policy.SHARE)
    ledger = reserved(ledger_of(claim("a", 0b0110), sharer), 0b1111)
    assert list(grown(ledger)) == []
    (kept,) = grown(ledger.after(LedgerChange(releases=(A,))))
    assert (kept.owned, kept.cpus, kept.still_in_use) == (0b0111, 0b0111, 0b1000)
    (kept,) = grown(ledger.after(LedgerChange(releases=(A, B))))
    assert kept.owned == 0b1111
    assert kept.reserved == ledger.claims[C].reserved


def test_a_later_call_reserves_cpus_that_were_excepted_before_and_keeps_owned_ones() -> None:
    ledger = reserved(ledger_of(claim("a", 0b0011)), 0b1111, but=0b0100)
    assert ledger.claims[C].owned == 0b1000
    assert free_of(TWO, ledger).cpus & 0b0100
    ledger = reserved(ledger, 0b1111)
    assert (ledger.claims[C].owned, ledger.claims[C].still_in_use) == (0b1100, 0b0011)


def test_shared_cpus_of_a_reservation_are_named_from_the_beginning() -> None:
    whole = claim("c", 0b11, 0, Policy.SHARE)
    kept = reserve(ledger_of(claim("a", 0b10)), whole, but=NO_CPUS, until=UNTIL)
    assert (kept.cpus, kept.owned, kept.still_in_use) == (0b11, 0, 0)


@given(owned=cpu_masks, wanted=cpu_masks, left=cpu_masks)
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


@given(wanted=cpu_masks)
def test_the_cpus_of_a_migration_on_its_target_are_taken_without_an_owner_until_its_pod_is_bound(
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
