"""The action for a claim follows from its pod: an ended QEMU releases it, its age alone never does."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from kvplace.controller.claim_action import (
    ClaimAction,
    action_from_cache,
    action_from_live_pod,
    claim_of_bound_pod,
    has_ended,
)
from kvplace.core.ledger import Claim, ClaimState, Ledger, LedgerChange
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.scalars import Bytes, CpuId, CpuMask, NodeName, NumaId, PodUid
from kvplace.kube.records import PodRecord

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
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


def claim(age: float, state: ClaimState = ClaimState.CLAIMED) -> Claim:
    since = (NOW - timedelta(seconds=age)).isoformat().replace("+00:00", "Z")
    return Claim(
        PodUid("u"),
        "default",
        "virt-launcher-db",
        "db",
        Policy.EXCLUSIVE,
        state,
        CpuMask(12),
        CpuMask(12),
        {},
        {},
        since,
    )


def action(pod: PodRecord | None, age: float, *, was_deleted: bool = False) -> ClaimAction:
    return action_from_cache(
        claim(age), NodeName("n"), pod, was_deleted=was_deleted, now=NOW, patience_s=PATIENCE
    )


@pytest.mark.parametrize(
    ("pod", "age", "expected"),
    [
        (replace(BOUND, phase="Succeeded"), 0, ClaimAction.RELEASE),
        (replace(BOUND, phase="Failed"), 0, ClaimAction.RELEASE),
        (replace(BOUND, compute_terminated=True), 0, ClaimAction.RELEASE),
        (replace(BOUND, deleting=True), 1e6, ClaimAction.CONFIRM),
        (BOUND, 1e6, ClaimAction.CONFIRM),
        (replace(BOUND, node=NodeName("other")), 0, ClaimAction.RELEASE),
        (POD, 59, ClaimAction.KEEP),
        (POD, 61, ClaimAction.READ_POD),
        (None, 5, ClaimAction.KEEP),
        (None, 11, ClaimAction.READ_POD),
    ],
    ids=repr,
)
def test_the_action_follows_from_the_pod(pod: PodRecord | None, age: float, expected: ClaimAction) -> None:
    assert action(pod, age) is expected


def test_a_pod_that_the_cache_had_and_has_no_more_is_looked_for_at_once() -> None:
    assert action(None, 0, was_deleted=True) is ClaimAction.READ_POD


def test_a_confirmed_claim_of_a_running_pod_is_left_alone_however_old() -> None:
    old = claim(1e8, ClaimState.BOUND)
    assert (
        action_from_cache(old, NodeName("n"), BOUND, was_deleted=False, now=NOW, patience_s=PATIENCE)
        is ClaimAction.KEEP
    )


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


def test_what_the_kubelet_reports_as_ended_is_released_whatever_the_agent_reported_last() -> None:
    assert live_action(replace(BOUND, phase="Failed"), 0, runs=True) is ClaimAction.RELEASE


def live_action(pod: PodRecord | None, age: float, *, runs: bool = False) -> ClaimAction:
    return action_from_live_pod(claim(age), NodeName("n"), pod, runs=runs, now=NOW, patience_s=PATIENCE)


@pytest.mark.parametrize("since", ["", "yesterday", "2026-01-02T03:04:05"])
def test_a_claim_without_a_readable_date_is_old(since: str) -> None:
    undated = replace(claim(0), since=since)
    assert (
        action_from_cache(undated, NodeName("n"), POD, was_deleted=False, now=NOW, patience_s=PATIENCE)
        is ClaimAction.READ_POD
    )


def test_a_container_named_compute_ends_a_vm_but_not_a_plain_pod_that_restarts_it() -> None:
    assert has_ended(replace(BOUND, compute_terminated=True))
    assert not has_ended(replace(BOUND, vmi="", compute_terminated=True))
    assert has_ended(replace(BOUND, vmi="", phase="Succeeded"))


def test_the_claim_of_a_bound_pod_is_made_again_from_its_placement() -> None:
    restored = claim_of_bound_pod(BOUND)
    assert restored == Claim(
        uid=PodUid("u"),
        namespace="default",
        pod="virt-launcher-db",
        vmi="db",
        policy=Policy.EXCLUSIVE,
        state=ClaimState.BOUND,
        cpus=CpuMask(0b1100),
        owned=CpuMask(0b111100),
        memory={NumaId(0): Bytes(8 << 30)},
        huge_pages={NumaId(0): {Bytes(1 << 30): 8}},
        since="",
    )
    Ledger().after(LedgerChange((restored,))).check()


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
