"""Each contradiction is reported once, with the CPUs and both parties; what is in order is not reported."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.claim_changes import reserve
from kvplace.core.drawing.core_map import ThreadState, draw
from kvplace.core.drawing.occupancy import FaultKind, Occupancy, printable
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.request import PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, PodUid
from kvplace.machines.server_types import read_machine
from tests.core.example_ledgers import claim, ledger_of, with_vm

MACHINE = replace(read_machine("epyc-7502p"), reserved=CpuMask(0b1))
MASKS = st.integers(0, (1 << 70) - 1)


def faults(ledger: Ledger, *, foreign: int = 0, found: dict[PodUid, CpuMask] | None = None) -> list[str]:
    return [fault.sentence for fault in Occupancy(MACHINE, ledger, CpuMask(foreign), found or {}).faults]


def test_two_owners_of_one_cpu_are_both_named() -> None:
    assert faults(ledger_of(claim("db", 0b1100), claim("web", 0b11000))) == [
        "CPU 3: owned by A (shop/db) and owned by B (shop/web)"
    ]


def test_a_vm_that_shares_a_cpu_of_an_owner_is_a_fault() -> None:
    assert faults(ledger_of(claim("db", 0b1100), claim("ci", 0b1000, 0, Policy.SHARE))) == [
        "CPU 3: owned by A (shop/db) and shared by B (shop/ci)"
    ]


def test_cpus_reserved_for_a_vm_are_named_as_reserved_and_are_not_a_fault() -> None:
    whole = claim("db", 0b111100, 0b111000)
    ledger = ledger_of(claim("web", 0b1100))
    kept = reserve(ledger, whole, but=NO_CPUS, until="2026-01-02T03:05:00Z")
    found = Occupancy(MACHINE, ledger.after(LedgerChange(claims=(kept,))))
    assert found.faults == ()
    assert found.name(kept.uid) == "A (shop/db (reserved until 2026-01-02T03:05:00Z))"
    assert found.holders[CpuId(5)] == (kept.uid,)


def test_cpus_kept_for_a_vm_that_waits_are_drawn_as_that_and_not_as_owned() -> None:
    kept = reserve(ledger_of(), claim("db", 0b111100), but=NO_CPUS, until="2026-01-02T03:05:00Z")
    drawing = draw("worker", MACHINE, ledger_of(claim("web", 0b11)).after(LedgerChange(claims=(kept,))))
    states = {thread.cpu: thread.state for thread in drawing.threads}
    assert (states[CpuId(1)], states[CpuId(2)]) == (ThreadState.OWNED, ThreadState.KEPT)
    assert "4 kept for VMs that wait" in drawing.summary


def test_cpus_that_are_reserved_or_in_use_outside_of_kvplace_must_not_be_owned() -> None:
    ledger = ledger_of(claim("db", 0b111), claim("ci", 0b11000, 0, Policy.SHARE))
    assert faults(ledger, foreign=0b10100) == [
        "CPU 0: owned by A (shop/db) and reserved for the host",
        "CPU 2: owned by A (shop/db) and in use outside of kvplace",
        "CPU 4: shared by B (shop/ci) and in use outside of kvplace",
    ]


def test_claims_and_owners_that_differ_are_faults_on_both_sides() -> None:
    ledger = Ledger({CpuId(4): PodUid("db"), CpuId(5): PodUid("gone")}, {PodUid("db"): claim("db", 0b1100)})
    assert faults(ledger) == [
        "CPU 2-3: claimed by A (shop/db) as its own, but without an owner in the ledger",
        "CPU 4: owned by A (shop/db), and its claim does not contain it",
        "CPU 5: owned by B (gone), which has no claim",
    ]


def test_cpus_that_the_machine_does_not_have_are_faults() -> None:
    assert faults(ledger_of(claim("db", 1 << 3 | 1 << 500)), foreign=1 << 600) == [
        "CPU 500: placed for A (shop/db), but the machine has no such CPU",
        "CPU 600: in use outside of kvplace, but the machine has no such CPU",
    ]


def test_threads_elsewhere_and_cpus_without_their_thread_are_drift() -> None:
    occupancy = Occupancy(MACHINE, ledger_of(claim("db", 0b1100)), found={PodUid("db"): CpuMask(0b10100)})
    assert [(fault.kind, fault.cpus, fault.sentence) for fault in occupancy.faults] == [
        (
            FaultKind.DRIFT,
            0b1000,
            "CPU 3: placed for A (shop/db), but none of its threads may run here",
        ),
        (
            FaultKind.DRIFT,
            0b10000,
            "CPU 4: threads of A (shop/db) may run here, but were not placed here",
        ),
    ]
    assert occupancy.strays == {4: ("db",)}


def test_a_thread_on_the_idle_sibling_of_its_own_vm_is_drift() -> None:
    assert faults(ledger_of(claim("db", 0b100, 0b1100)), found={PodUid("db"): CpuMask(0b1100)}) == [
        "CPU 3: threads of A (shop/db) may run here, but were not placed here"
    ]


@given(st.lists(st.sampled_from([*Smt]), max_size=5), st.booleans())
def test_placements_of_the_allocator_that_threads_keep_to_have_no_faults(
    smts: list[Smt], measured: bool
) -> None:
    machine, ledger = read_machine("epyc-7502p"), Ledger()
    for number, smt in enumerate(smts):
        ledger = with_vm(
            machine, ledger, f"vm-{number}", Request(3, PinningOptions(scope=Scope.ANY, smt=smt))
        )
    ledger = with_vm(machine, ledger, "ci", Request(2, PinningOptions(scope=Scope.ANY, policy=Policy.SHARE)))
    found = {uid: claim.cpus for uid, claim in ledger.claims.items()} if measured else {}
    assert Occupancy(machine, ledger, found=found).faults == ()


@given(st.lists(st.tuples(MASKS, MASKS), max_size=4), MASKS, st.lists(MASKS, max_size=4))
def test_a_cpu_is_faulty_when_more_than_one_thing_is_true_of_it_and_only_then(
    sets: list[tuple[int, int]], foreign: int, found: list[int]
) -> None:
    claims = [claim(f"vm-{number}", cpus, owned) for number, (cpus, owned) in enumerate(sets)]
    seen = {claim.uid: CpuMask(cpus) for claim, cpus in zip(claims, found, strict=False)}
    occupancy = Occupancy(MACHINE, ledger_of(*claims), CpuMask(foreign), seen)
    for cpu in range(71):
        owners = sum(claim.owned >> cpu & 1 for claim in claims)
        sharers = sum((claim.cpus & ~claim.owned) >> cpu & 1 for claim in claims)
        others = foreign >> cpu & 1
        host = MACHINE.reserved >> cpu & 1
        lacking = not MACHINE.cpus >> cpu & 1 and bool(owners or sharers or others)
        conflict = lacking or owners > 1 or (owners and (sharers or others or host)) or (sharers and others)
        drift = any((cpus ^ occupancy.ledger.claims[uid].cpus) >> cpu & 1 for uid, cpus in seen.items())
        assert bool(occupancy.faulty[FaultKind.CONFLICT] >> cpu & 1) == bool(conflict)
        assert bool(occupancy.faulty[FaultKind.DRIFT] >> cpu & 1) == drift


@given(st.text())
def test_names_are_shown_without_control_characters(name: str) -> None:
    shown = printable(name)
    assert shown.isprintable()
    assert len(shown) == len(name)
    assert printable(shown) == shown
    assert printable("db\x1b[2J\u202etab\n") == "db�[2J�tab�"
