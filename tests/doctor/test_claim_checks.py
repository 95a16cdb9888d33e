"""Ledgers and VMs as doctor reads them: what is right passes, what is wrong is named."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from kvplace.core.ledger import Ledger
from kvplace.core.scalars import CpuId, PodUid
from kvplace.doctor.claim_checks import check_ledgers, check_vms, suspects
from tests.doctor.examples import NOW, installation, pod, problems, view
from tests.kube.example_claims import claim, taking


def test_a_vm_that_is_measured_on_claimed_cores_is_well() -> None:
    ledger = Ledger().after(taking(claim("db", 0, 8)))
    assert problems(check_vms, **view(pod("db", pinned=True), ledger=ledger)) == []
    assert problems(check_ledgers, **view(pod("db", pinned=True), ledger=ledger)) == []


def test_vms_without_claims_without_measurements_and_beside_their_cores_are_named() -> None:
    ledger = Ledger().after(taking(claim("db", 0, 8)))
    (strayed,) = check_vms(installation(**view(pod("db", pinned=False), ledger=ledger)))
    assert "threads run on other CPUs than placed" in strayed.problem
    assert "get vm NAME -n NAMESPACE -o wide" in strayed.fix
    assert "never measured" in problems(check_vms, **view(pod("db"), ledger=ledger))[0]
    assert "their node's ledger does not give them" in problems(check_vms, **view(pod("db", pinned=True)))[0]


def test_a_pod_that_outlives_its_qemu_is_named_once_with_its_fix() -> None:
    held = replace(pod("db", pinned=False), vmi="db", compute_terminated=True)
    (found,) = check_vms(installation(**view(held)))
    assert found.about == "Pod default/pod-db"
    assert found.problem == (
        "its QEMU has ended and another container still runs, so KubeVirt starts no migration of VM db"
    )
    assert found.fix == "`kubectl -n default delete pod pod-db`"
    assert problems(check_ledgers, **view(held)) == []
    # It may end in a moment; a deleted one the kubelet ends anyway.
    assert suspects(installation(**view(held))) == {"db"}
    assert problems(check_vms, cleared=frozenset({"db"}), **view(held)) == []
    assert problems(check_vms, **view(replace(held, deleting=True))) == []


def test_a_vm_whose_pod_admission_never_saw_is_named() -> None:
    vmi = {"metadata": {"name": "db", "namespace": "default"}, "status": {"activePods": {"u": "worker"}}}
    (found,) = problems(check_vms, objects={"virtualmachineinstances": (vmi,)})
    assert (
        "VirtualMachineInstance default/db: it opted in, but its pod (UID u) did not pass admission" in found
    )


def test_claims_that_contradict_owners_machine_or_pods_are_named() -> None:
    good = claim("db", 0, 8)
    odd = Ledger({CpuId(0): PodUid("db"), CpuId(5): PodUid("ghost")}, {PodUid("db"): good})
    found = problems(check_ledgers, **view(pod("db"), ledger=odd))
    assert any("CPUs 5 belong to ghost, which has no claim" in text for text in found)
    assert any("claims CPUs 8 for itself, which have no owner" in text for text in found)
    beyond = Ledger().after(taking(claim("db", 0, 99)))
    (machine,) = problems(check_ledgers, **view(pod("db"), ledger=beyond))
    assert "claims CPUs 99, which the machine does not have" in machine
    (lost,) = problems(check_ledgers, **view(ledger=Ledger().after(taking(good))))
    assert "default/pod-db hold CPUs there and have no running pod" in lost


def test_a_claim_that_was_just_made_may_have_no_pod_yet() -> None:
    fresh = claim("db", 0, 8, since=(NOW - timedelta(seconds=20)).isoformat())
    assert problems(check_ledgers, **view(ledger=Ledger().after(taking(fresh)))) == []
