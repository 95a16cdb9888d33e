"""While a running pod gets other cores, its claim holds the old and the new ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.claim_changes import (
    claim_after_relocation,
    claim_while_relocating,
    claim_with_lost_relocation,
    held_by_others,
    way_back,
)
from kvplace.core.ledger import (
    Claim,
    Ledger,
    LedgerChange,
    Relocation,
    claim_document,
    claim_of,
    read_ledger,
)
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, PinningOptions, Policy
from kvplace.core.scalars import Bytes, CpuId, CpuMask, NodeName, NumaId, PodUid

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


def test_afterwards_it_holds_what_a_bind_with_the_new_placement_would_have_claimed() -> None:
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


def test_a_relocation_that_was_lost_is_put_back_with_what_others_have_left_of_a_pool() -> None:
    pool, shared = placed(0b1111, policy=Policy.NUMA), placed(0b0010, revision=2, policy=Policy.SHARE)
    other = claim_of(PodUid("other"), placed(0b1000).placement)
    ledger = Ledger().after(LedgerChange(claims=(other, claimed(shared))))
    found = claim_with_lost_relocation(ledger, claimed(shared), Relocation(shared, pool))
    assert (found.cpus, held_by_others(ledger, found)) == (0b0111, 0)
    named = replace(claimed(placed(0b1000)), uid=UID)
    assert held_by_others(ledger, named) == 0b1000


def test_a_relocation_to_a_pool_that_was_lost_is_put_back_with_what_others_have_left_of_it() -> None:
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
