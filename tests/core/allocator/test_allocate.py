"""The promises to callers besides the rules for one placement, which `test_exact_rules.py` checks all.

Equal questions get equal answers, vCPUs come in the machine's order, VM after VM finds only what is left, and
a refusal counts.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import mask_of
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_BYTES, PodUid
from kvplace.core.topology import Topology
from tests.core.machines import GIB, frees, make_numa_node, make_package, make_topology, requests, topologies

cases = topologies().flatmap(lambda machine: st.tuples(st.just(machine), frees(machine), requests()))
exclusive_cases = topologies().flatmap(
    lambda machine: st.tuples(st.just(machine), frees(machine), requests(policies=(Policy.EXCLUSIVE,)))
)
Case = tuple[Topology, Free, Request]


def placed(case: Case) -> Placement:
    """The placement of a case; cases that do not fit are not checked."""
    answer = place(*case)
    assume(isinstance(answer, Placement))
    assert isinstance(answer, Placement)
    return answer


@given(exclusive_cases)
def test_vcpus_come_in_the_order_of_the_machine_with_siblings_side_by_side(case: Case) -> None:
    machine = case[0]
    placement = placed(case)
    order = [machine.package_of[cpu] for cpu in placement.vcpus]
    assert order == sorted(order)
    cores = [machine.core_of[cpu] for cpu in placement.vcpus]
    assert len(set(cores)) == 1 + sum(1 for before, after in pairwise(cores) if before != after)


@given(cases)
def test_equal_questions_get_equal_answers(case: Case) -> None:
    machine, free, request = case
    again = place(replace(machine), replace(free), replace(request))
    assert again == place(machine, free, request)


@given(cases)
def test_a_refusal_counts_the_shortage_and_knows_when_no_departure_can_fix_it(case: Case) -> None:
    machine, free, request = case
    refusal = place(machine, free, request)
    assume(isinstance(refusal, Refusal))
    assert isinstance(refusal, Refusal)
    needed, best, missing = (refusal.shortfall[key] for key in ("needed", "best", "missing"))
    assert isinstance(needed, int)
    assert isinstance(best, int)
    assert missing == needed - best > 0
    assert str(refusal.shortfall["where"]) in refusal.message
    assert refusal.never == isinstance(place(machine, free_of(machine, Ledger()), request), Refusal)


@given(topologies(), st.lists(requests(most_vcpus=6), min_size=1, max_size=8))
def test_successive_vms_never_overlap_and_their_departure_restores_everything(
    machine: Topology, asked: list[Request]
) -> None:
    ledger, empty = Ledger(), free_of(machine, Ledger())
    for number, request in enumerate(asked):
        free = free_of(machine, ledger)
        answer = place(machine, free, request)
        if isinstance(answer, Placement):
            named = mask_of(ledger.shared_use)
            assert answer.owned & (ledger.owned | named) == 0
            assert answer.cpus & ledger.owned == 0
            ledger = ledger.after(LedgerChange((_claim(f"vm-{number}", answer),)))
            ledger.check()
            left = free_of(machine, ledger)
            assert left.cpus & (answer.cpus | answer.owned) == 0
            assert all(count >= 0 for _, _, count in left.huge_pages)
    assert ledger.owned & machine.reserved == 0
    assert free_of(machine, ledger.after(LedgerChange(releases=tuple(ledger.claims)))) == empty


@given(topologies(), requests(scopes=(Scope.ANY,), policies=(Policy.EXCLUSIVE,), smts=(Smt.PREFER,)))
def test_a_vm_takes_no_more_sockets_than_it_must_when_memory_does_not_matter(
    machine: Topology, request: Request
) -> None:
    request = replace(
        request,
        options=replace(request.options, emulator_threads=EmulatorThreads.SHARED),
        memory=NO_BYTES,
        huge_pages={},
    )
    free = free_of(machine, Ledger())
    placement = placed((machine, free, request))
    sizes = sorted(((package.cpus & free.cpus).bit_count() for package in machine.packages), reverse=True)
    assert sum(sizes[: len(placement.packages) - 1]) < request.vcpus


def test_a_machine_of_thirty_numa_nodes_is_not_searched_set_by_set_for_memory_that_it_lacks() -> None:
    cpus = range(30)
    machine = make_topology(
        packages=(make_package(0, mask_of(cpus)),),
        numa_nodes=tuple(make_numa_node(cpu, 1 << cpu, GIB) for cpu in cpus),
        l3_groups=tuple(1 << cpu for cpu in cpus),
        cores=tuple(1 << cpu for cpu in cpus),
    )
    answer = place(
        machine, free_of(machine, Ledger()), Request(2, PinningOptions(scope=Scope.ANY), memory=31 * GIB)
    )
    assert isinstance(answer, Refusal)
    assert answer.shortfall["missing"] == GIB


SPLIT_CORES = make_topology(
    packages=(make_package(0, 0b1111),),
    numa_nodes=(make_numa_node(0, 0b0011, 0), make_numa_node(1, 0b1100, 0)),
    l3_groups=(0b0011, 0b1100),
    cores=(0b0101, 0b1010),
)


@pytest.mark.parametrize("scope", [Scope.ANY, Scope.ONE_NUMA, Scope.ONE_L3])
@pytest.mark.parametrize("smt", [Smt.REQUIRE, Smt.ISOLATE])
def test_a_core_that_lies_in_two_caches_is_never_given_out_whole(scope: Scope, smt: Smt) -> None:
    answer = place(
        SPLIT_CORES, free_of(SPLIT_CORES, Ledger()), Request(2, PinningOptions(scope=scope, smt=smt))
    )
    assert isinstance(answer, Refusal)
    assert answer.shortfall["best"] == 0
    plain = place(SPLIT_CORES, free_of(SPLIT_CORES, Ledger()), Request(2, PinningOptions(scope=scope)))
    assert isinstance(plain, Placement)


def _claim(uid: str, placement: Placement) -> Claim:
    return Claim(
        uid=PodUid(uid),
        namespace="default",
        pod=uid,
        vmi="",
        policy=placement.policy if placement.owned else Policy.SHARE,
        cpus=placement.cpus,
        owned=placement.owned,
        memory=placement.memory,
        huge_pages=placement.huge_pages,
        since="",
    )
