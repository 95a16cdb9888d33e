"""The action for a claim follows from its pod: an ended QEMU releases it, its age alone never does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplace.controller.claim_action import (
    ClaimAction,
    ClaimAges,
    action_for,
    claim_of_bound_pod,
    replaces,
)
from kvplace.core.ledger import Claim, Ledger, LedgerChange, Relocation, Reserved, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NodeName, NumaId, PodUid
from kvplace.kube.object_records import PodRecord

PATIENCE = 60.0
PLACED = PodPlacement(
    pod_uid=PodUid("u"),
    node=NodeName("n"),
    topology="",
    on_failure=OnFailure.WAIT,
    placement=Placement(
        policy=Policy.EXCLUSIVE,
        vcpus=(CpuId(2), CpuId(3)),
        cpus=CpuMask(0b1100),
        emulator_cpus=CpuMask(1),
        io_thread_cpus=(),
        numa_nodes=(NumaId(0),),
        numa_memory=NumaMemory.PREFERRED,
        memory={NumaId(0): Bytes(8 << 30)},
        owned=CpuMask(0b111100),
        huge_pages={NumaId(0): {Bytes(1 << 30): 8}},
    ),
)
POD = PodRecord("default", "virt-launcher-db", PodUid("u"), phase="Pending", vmi="db")
BOUND = replace(POD, node=NodeName("n"), phase="Running", placement=PLACED.to_json())


def claim() -> Claim:
    return Claim(
        PodUid("u"),
        "default",
        "virt-launcher-db",
        "db",
        Policy.EXCLUSIVE,
        CpuMask(12),
        CpuMask(12),
        {},
        {},
        since="2026-01-02T03:04:05.678901Z",
    )


def action(
    pod: PodRecord | None, age: float, *, was_deleted: bool = False, runs: bool = False
) -> ClaimAction:
    return action_for(
        claim(),
        NodeName("n"),
        pod,
        is_live=False,
        runs=runs,
        age_s=age,
        patience_s=PATIENCE,
        was_deleted=was_deleted,
    )


@pytest.mark.parametrize(
    ("pod", "age", "expected"),
    [
        (replace(BOUND, phase="Succeeded"), 0, ClaimAction.RELEASE),
        (replace(BOUND, phase="Failed"), 0, ClaimAction.RELEASE),
        (replace(BOUND, compute_terminated=True), 0, ClaimAction.RELEASE),
        (replace(BOUND, deleting=True), 1e6, ClaimAction.COMPARE),
        (BOUND, 1e6, ClaimAction.COMPARE),
        (replace(BOUND, node=NodeName("other")), 0, ClaimAction.RELEASE),
        (POD, 59, ClaimAction.KEEP),
        (POD, 61, ClaimAction.READ_POD),
        (None, 1, ClaimAction.KEEP),
        (None, 3, ClaimAction.READ_POD),
    ],
    ids=repr,
)
def test_the_action_follows_from_the_pod(pod: PodRecord | None, age: float, expected: ClaimAction) -> None:
    assert action(pod, age) is expected


def test_a_pod_that_the_cache_had_and_has_no_more_is_searched_for_at_once() -> None:
    assert action(None, 0, was_deleted=True) is ClaimAction.READ_POD


@pytest.mark.parametrize(
    ("pod", "age", "expected"),
    [
        (None, 0, ClaimAction.RELEASE),
        (replace(POD, uid=PodUid("another")), 0, ClaimAction.RELEASE),
        (replace(BOUND, phase="Succeeded"), 0, ClaimAction.RELEASE),
        (BOUND, 1e6, ClaimAction.KEEP),
        (replace(BOUND, deleting=True), 1e6, ClaimAction.KEEP),
        (replace(BOUND, node=NodeName("other")), 0, ClaimAction.RELEASE),
        (POD, 11, ClaimAction.KEEP),
        (POD, 60, ClaimAction.KEEP),
        (POD, 61, ClaimAction.RELEASE),
    ],
    ids=repr,
)
def test_the_live_pod_decides_and_a_bind_has_its_time(
    pod: PodRecord | None, age: float, expected: ClaimAction
) -> None:
    assert live_action(pod, age) is expected


@pytest.mark.parametrize("pod", [None, replace(POD, uid=PodUid("another"))])
def test_a_pod_that_is_gone_keeps_its_claim_while_the_agent_sees_its_container(pod: PodRecord | None) -> None:
    assert live_action(pod, 0, runs=True) is ClaimAction.KEEP


def test_the_claim_of_a_pod_that_the_kubelet_reports_as_ended_is_released_despite_the_agent() -> None:
    assert live_action(replace(BOUND, phase="Failed"), 0, runs=True) is ClaimAction.RELEASE


def live_action(pod: PodRecord | None, age: float, *, runs: bool = False) -> ClaimAction:
    return action_for(claim(), NodeName("n"), pod, is_live=True, runs=runs, age_s=age, patience_s=PATIENCE)


def test_a_container_named_compute_ends_a_vm_but_not_a_plain_pod_that_restarts_it() -> None:
    assert replace(BOUND, compute_terminated=True).has_ended
    assert not replace(BOUND, vmi="", compute_terminated=True).has_ended
    assert replace(BOUND, vmi="", phase="Succeeded").has_ended


def test_the_claim_of_a_bound_pod_is_made_again_from_its_placement() -> None:
    restored = claim_of_bound_pod(BOUND)
    assert restored == Claim(
        uid=PodUid("u"),
        namespace="default",
        pod="virt-launcher-db",
        vmi="db",
        policy=Policy.EXCLUSIVE,
        cpus=CpuMask(0b1100),
        owned=CpuMask(0b111100),
        memory={NumaId(0): Bytes(8 << 30)},
        huge_pages={NumaId(0): {Bytes(1 << 30): 8}},
        since="",
    )
    Ledger().after(LedgerChange((restored,))).check()


@pytest.mark.parametrize(
    ("cpus", "revision", "relocating", "expected"),
    [
        (0b111100, 1, False, False),
        (0b11000000, 1, False, True),
        (0b11000000, 2, False, False),
        (0b11111100, 1, True, False),
    ],
    ids=["the same", "another bind's", "newer than the pod that was read", "under relocation"],
)
def test_the_placement_of_a_bound_pod_replaces_a_different_claim_of_the_same_revision(
    cpus: int, revision: int, relocating: bool, expected: bool
) -> None:
    restored = claim_of_bound_pod(BOUND)
    assert restored is not None
    stored = replace(
        restored,
        cpus=restored.cpus if cpus == restored.owned else CpuMask(cpus),
        owned=CpuMask(cpus),
        revision=revision,
        relocation=Relocation(PLACED) if relocating else None,
    )
    assert replaces(restored, stored) is expected
    assert replaces(restored, None)


@pytest.mark.parametrize("policy", [Policy.EXCLUSIVE, Policy.NONE])
def test_a_vm_that_was_bound_without_regard_to_its_reservation_keeps_its_claim_while_it_gets_other_cores(
    policy: Policy,
) -> None:
    moving = replace(
        claim(),
        reserved=Reserved(CpuMask(12), "2026-01-02T03:19:05Z"),
        relocation=Relocation(PLACED),
    )
    placement = PLACED.placement
    if policy is Policy.NONE:
        placement = replace(placement, policy=policy, vcpus=(), cpus=CpuMask(0), owned=CpuMask(0))
    pod = replace(BOUND, placement=replace(PLACED, revision=2, placement=placement).to_json())
    node = NodeName("n")
    now = action_for(moving, node, pod, is_live=False, runs=True, age_s=0.0, patience_s=PATIENCE)
    assert now is ClaimAction.COMPARE
    live = action_for(moving, node, pod, is_live=True, runs=True, age_s=0.0, patience_s=PATIENCE)
    assert live is ClaimAction.KEEP
    assert not replaces(replace(claim(), cpus=CpuMask(4), owned=CpuMask(4), revision=2), moving)


def test_a_bound_pod_that_its_agent_reports_running_keeps_its_claim_until_it_is_terminal() -> None:
    ended = replace(BOUND, compute_terminated=True)
    assert action(ended, 1e6, runs=True) is ClaimAction.KEEP
    live = action_for(claim(), NodeName("n"), ended, is_live=True, runs=True, age_s=1e6, patience_s=PATIENCE)
    assert live is ClaimAction.KEEP
    assert action(replace(ended, phase="Failed"), 0, runs=True) is ClaimAction.RELEASE


def test_a_restored_claim_states_for_which_revision_it_is() -> None:
    restored = claim_of_bound_pod(replace(BOUND, placement=replace(PLACED, revision=3).to_json()))
    assert restored is not None
    assert restored.revision == 3


@pytest.mark.parametrize(
    "pod",
    [
        POD,
        replace(BOUND, phase="Succeeded"),
        replace(BOUND, placement=""),
        replace(BOUND, placement="{"),
        replace(BOUND, placement=replace(PLACED, pod_uid=PodUid("source")).to_json()),
        replace(BOUND, placement=replace(PLACED, node=NodeName("source")).to_json()),
        replace(BOUND, placement=PodPlacement.floating(pod_uid=PodUid("u"), node=NodeName("n")).to_json()),
    ],
    ids=["unbound", "ended", "none", "junk", "inherited", "of another node", "floating"],
)
def test_a_pod_without_a_placement_of_its_own_has_no_claim_to_lose(pod: PodRecord) -> None:
    assert claim_of_bound_pod(pod) is None


@pytest.mark.parametrize(("age", "expected"), [(29, ClaimAction.KEEP), (31, ClaimAction.RELEASE)])
def test_the_reservation_of_a_migration_stays_while_it_is_renewed_although_no_pod_has_its_uid(
    age: float, expected: ClaimAction
) -> None:
    kept = replace(claim(), reserved=Reserved(CpuMask(12), "2026-01-02T03:19:05Z", "move-1"))
    now = action_for(kept, NodeName("n"), None, is_live=False, runs=False, age_s=age, patience_s=PATIENCE)
    assert now is expected


NODE = NodeName("n")
CLAIM = claim_of(PodUid("u"), Placement(Policy.SHARE, (), NO_CPUS), since="1970-01-01T00:00:00.000000Z")


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_claim_ages_from_the_first_check_of_it_and_a_new_date_makes_it_new() -> None:
    clock = Clock()
    ages = ClaimAges(clock)
    assert ages.age_s(NODE, CLAIM) == 0
    clock.seconds = 130.0
    assert ages.age_s(NODE, CLAIM) == 30
    assert ages.age_s(NodeName("other"), CLAIM) == 0
    again = replace(CLAIM, since="1960-01-01T00:00:00.000000Z")
    assert ages.age_s(NODE, again) == 0
    clock.seconds = 150.0
    assert ages.age_s(NODE, again) == 20


def test_claims_that_are_gone_are_forgotten() -> None:
    clock = Clock()
    ages = ClaimAges(clock)
    ages.age_s(NODE, CLAIM)
    ages.keep(lambda node, uid: (node, uid) == (NODE, CLAIM.uid))
    clock.seconds = 130.0
    assert ages.age_s(NODE, CLAIM) == 30
    ages.keep(lambda *_: False)
    assert not ages._seen
    assert ages.age_s(NODE, CLAIM) == 0
