"""Whatever is placed is placed right, on any machine: inside what is free, in scope, whole where asked."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplace.core.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Claim, ClaimState, Ledger, LedgerChange
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request import EmulatorThreads, NumaMemory, Policy, Request, Scope, Smt
from kvplace.core.topology import NumaNode, Package, Topology
from tests.core.machines import GIB, frees, requests, subsets, topologies

cases = topologies().flatmap(lambda machine: st.tuples(st.just(machine), frees(machine), requests()))
exclusive_cases = topologies().flatmap(
    lambda machine: st.tuples(st.just(machine), frees(machine), requests(policies=(Policy.EXCLUSIVE,)))
)
whole_core_cases = topologies().flatmap(
    lambda machine: st.tuples(
        st.just(machine),
        frees(machine),
        requests(policies=(Policy.EXCLUSIVE,), smts=(Smt.REQUIRE, Smt.ISOLATE)),
    )
)
Case = tuple[Topology, Free, Request]


def placed(case: Case) -> Placement:
    """The placement of a case; cases that do not fit are not looked at."""
    answer = place(*case)
    assume(isinstance(answer, Placement))
    assert isinstance(answer, Placement)
    return answer


@given(cases)
def test_every_vcpu_has_a_cpu_of_its_own_that_was_free(case: Case) -> None:
    _, free, request = case
    placement = placed(case)
    assert len(set(placement.vcpus)) == len(placement.vcpus) == request.vcpus
    available = free.cpus if request.owns_cpus else free.pool
    assert mask_of(placement.vcpus) & ~placement.cpus == 0
    assert (placement.cpus | placement.owned) & ~available == 0


@given(cases)
def test_the_scope_holds_for_every_cpu_the_vm_names_or_owns(case: Case) -> None:
    machine, _, request = case
    placement = placed(case)
    touched = placement.cpus | placement.owned
    assert placement.packages == machine.packages_of(placement.cpus)
    match request.scope:
        case Scope.ONE_SOCKET:
            assert len(machine.packages_of(touched)) == 1
        case Scope.ONE_NUMA:
            assert len(machine.nodes_of(touched)) == 1
            assert len(placement.numa_nodes) == 1
        case Scope.ONE_L3:
            assert sum(1 for l3 in machine.l3_groups if l3 & touched) == 1
            assert len(placement.l3_groups) == 1
        case _:
            pass


@given(cases)
def test_an_exclusive_vm_owns_all_it_names_and_a_sharing_one_owns_nothing(case: Case) -> None:
    request = case[2]
    placement = placed(case)
    if request.owns_cpus:
        assert placement.cpus & ~placement.owned == 0
    else:
        assert placement.owned == 0
        assert mask_of(placement.vcpus) & ~placement.cpus == 0


@given(whole_core_cases)
def test_whole_cores_are_owned_whole_and_isolated_vcpus_never_share_one(case: Case) -> None:
    machine, _, request = case
    placement = placed(case)
    cores = [core for core in machine.cores if core & placement.owned]
    assert placement.owned == mask_of(cpu for core in cores for cpu in cpus_of(core))
    if request.smt is Smt.ISOLATE:
        assert all((core & placement.cpus).bit_count() == 1 for core in cores)
    else:
        assert placement.cpus == placement.owned


@given(cases)
def test_emulator_threads_run_where_they_were_asked_to(case: Case) -> None:
    machine, _, request = case
    placement = placed(case)
    vcpus = mask_of(placement.vcpus)
    spare = placement.cpus & ~vcpus
    assert placement.emulator_cpus
    if request.emulator_threads is EmulatorThreads.ISOLATE:
        assert placement.emulator_cpus == spare
    elif spare:  # an odd thread of a core that is owned whole
        assert request.smt is Smt.REQUIRE
        assert placement.emulator_cpus == spare
    elif request.emulator_threads is EmulatorThreads.WITH_VCPUS:
        assert placement.emulator_cpus == vcpus
    else:
        assert placement.emulator_cpus in (
            machine.reserved & mask_of(c for n in placement.numa_nodes for c in cpus_of(_cpus(machine, n))),
            machine.reserved,
            vcpus,
        )


@given(cases)
def test_emulator_threads_never_run_on_cpus_that_another_vm_may_own(case: Case) -> None:
    machine = case[0]
    placement = placed(case)
    assert placement.emulator_cpus & ~(machine.reserved | placement.cpus) == 0


@given(cases)
def test_memory_and_pages_are_all_there_on_the_nodes_of_the_vm(case: Case) -> None:
    _, free, request = case
    placement = placed(case)
    pages = {
        (node, size): count for node, sizes in placement.huge_pages.items() for size, count in sizes.items()
    }
    assert {node for node, _ in pages} <= set(placement.numa_nodes)
    for size, count in request.huge_pages.items():
        assert sum(taken for (_, other), taken in pages.items() if other == size) == count
    assert all(count <= free.pages_by_node[key] for key, count in pages.items())
    if not free.memory or not request.memory or request.numa_memory is NumaMemory.OFF:
        assert placement.memory == {}
        return
    assert set(placement.memory) == set(placement.numa_nodes)
    pages_bytes = sum(size * count for (_, size), count in pages.items())
    assert sum(placement.memory.values()) == max(request.memory, pages_bytes)
    for node, count in placement.memory.items():
        plain = count - sum(size * taken for (where, size), taken in pages.items() if where == node)
        assert 0 <= plain <= max(0, free.memory_by_node[node])


@given(cases)
def test_every_numa_node_with_cpus_of_the_vm_is_a_node_of_the_vm(case: Case) -> None:
    machine = case[0]
    placement = placed(case)
    assert set(machine.nodes_of(mask_of(placement.vcpus))) <= set(placement.numa_nodes)


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


@given(cases, st.data())
def test_what_fits_still_fits_when_more_is_free(case: Case, data: st.DataObject) -> None:
    machine, free, request = case
    placed(case)
    more_pool = free.pool | data.draw(subsets(machine.allocatable))
    more_cpus = free.cpus | data.draw(subsets(more_pool))
    more = replace(
        free,
        cpus=more_cpus,
        pool=more_pool,
        memory=tuple((node, count + data.draw(st.integers(0, GIB))) for node, count in free.memory),
    )
    assert isinstance(place(machine, more, request), Placement)


@given(cases)
def test_a_refusal_counts_what_is_missing_and_knows_what_no_departure_can_mend(case: Case) -> None:
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
def test_a_vm_takes_no_more_sockets_than_it_must_when_memory_is_no_matter(
    machine: Topology, request: Request
) -> None:
    request = replace(request, memory=0, huge_pages={}, emulator_threads=EmulatorThreads.SHARED)
    free = free_of(machine, Ledger())
    placement = placed((machine, free, request))
    sizes = sorted(((package.cpus & free.cpus).bit_count() for package in machine.packages), reverse=True)
    assert sum(sizes[: len(placement.packages) - 1]) < request.vcpus


def test_a_machine_of_thirty_numa_nodes_is_not_searched_set_by_set_for_memory_that_it_lacks() -> None:
    cpus = range(30)
    machine = Topology(
        packages=(Package(0, mask_of(cpus)),),
        numa_nodes=tuple(NumaNode(cpu, 1 << cpu, GIB) for cpu in cpus),
        l3_groups=tuple(1 << cpu for cpu in cpus),
        cores=tuple(1 << cpu for cpu in cpus),
    )
    answer = place(machine, free_of(machine, Ledger()), Request(2, scope=Scope.ANY, memory=31 * GIB))
    assert isinstance(answer, Refusal)
    assert answer.shortfall["missing"] == GIB


SPLIT_CORES = Topology(
    packages=(Package(0, 0b1111),),
    numa_nodes=(NumaNode(0, 0b0011, 0), NumaNode(1, 0b1100, 0)),
    l3_groups=(0b0011, 0b1100),
    cores=(0b0101, 0b1010),
)


@pytest.mark.parametrize("scope", [Scope.ANY, Scope.ONE_NUMA, Scope.ONE_L3])
@pytest.mark.parametrize("smt", [Smt.REQUIRE, Smt.ISOLATE])
def test_a_core_that_lies_in_two_caches_is_never_given_out_whole(scope: Scope, smt: Smt) -> None:
    answer = place(SPLIT_CORES, free_of(SPLIT_CORES, Ledger()), Request(2, scope=scope, smt=smt))
    assert isinstance(answer, Refusal)
    assert answer.shortfall["best"] == 0
    plain = place(SPLIT_CORES, free_of(SPLIT_CORES, Ledger()), Request(2, scope=scope))
    assert isinstance(plain, Placement)


def _cpus(machine: Topology, node: int) -> int:
    return machine.node_by_id[node].cpus


def _claim(uid: str, placement: Placement) -> Claim:
    return Claim(
        uid=uid,
        namespace="default",
        pod=uid,
        vmi="",
        policy=placement.policy if placement.owned else Policy.SHARE,
        state=ClaimState.CLAIMED,
        cpus=placement.cpus,
        owned=placement.owned,
        memory=placement.memory,
        huge_pages=placement.huge_pages,
        since="",
    )
