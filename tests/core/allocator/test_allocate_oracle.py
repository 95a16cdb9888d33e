"""Every answer equals the answer of a search through every set of CPUs, on small machines of any build.

Where levels nest, objectives 1-4 (sockets, NUMA nodes, distances, L3 groups, cores) are promised to be exact.
Whether a VM fits is exact on every machine. `test_exact_small_machines.py` checks all free sets of a few
machines; here the machines are any.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import Policy, Request, Scope, Smt
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import BestKeys, Judge, Key, best_key, levels_nest, with_cpus
from tests.core.allocator.random_cases import random_case
from tests.core.allocator.validity import key_of_valid
from tests.core.machines import OFFERED_SCOPES, PINNING, frees, requests, topologies
from tests.profiles import examples, rounds

Case = tuple[Topology, Free, Request]


def cases(
    most_cpus: int,
    *,
    policies: tuple[Policy, ...] = PINNING,
    scopes: tuple[Scope, ...] = tuple(Scope),
    memory: bool | None = None,
    tangled: bool | None = False,
) -> st.SearchStrategy[Case]:
    """Any machine, nested or tangled, with anything free and a request that makes sense for its policy."""
    return topologies(most_cpus=most_cpus, tangled=tangled, memory=memory).flatmap(
        lambda machine: st.tuples(
            st.just(machine),
            frees(machine),
            requests(most_vcpus=most_cpus, scopes=scopes, policies=policies).map(sensible),
        )
    )


def sensible(request: Request) -> Request:
    """Whole cores of its own only an exclusive VM can have; a floating one has no threads to put on cores."""
    if request.options.policy is Policy.NUMA or (
        request.options.smt is Smt.ISOLATE and not request.owns_cpus
    ):
        return replace(request, options=replace(request.options, smt=Smt.PREFER))
    return request


def key_of_answer(case: Case) -> Key | None:
    """The key of what the allocator gives, checked to be right; None for a refusal."""
    answer = place(*case)
    event(f"fits {isinstance(answer, Placement)}")
    return key_of_valid(*case, answer) if isinstance(answer, Placement) else None


@settings(max_examples=examples(250))
@given(cases(16))
def test_a_vm_is_placed_as_well_as_a_search_of_every_set_of_cpus_could_place_it(case: Case) -> None:
    assert key_of_answer(case) == best_key(*case)


@settings(max_examples=examples(150))
@given(cases(16, memory=True))
def test_memory_and_huge_pages_are_found_where_a_search_of_every_set_of_cpus_finds_them(case: Case) -> None:
    assert key_of_answer(case) == best_key(*case)


@settings(max_examples=examples(100))
@given(cases(16, policies=(Policy.NUMA,), scopes=OFFERED_SCOPES))
def test_a_vm_on_the_pool_of_numa_nodes_gets_the_best_of_all_sets_of_nodes(case: Case) -> None:
    # Which CPUs and caches come with the nodes is not the VM's choice, so it is not an objective.
    answer, best = key_of_answer(case), best_key(*case)
    assert (answer and answer[:4]) == (best and best[:4])


@settings(max_examples=examples(150))
@given(cases(14, tangled=True))
def test_where_levels_cross_a_vm_is_placed_by_the_rules_exactly_when_it_fits(case: Case) -> None:
    assert (key_of_answer(case) is None) == (best_key(*case) is None)


@settings(max_examples=examples(150))
@given(cases(14, tangled=None))
def test_a_vm_is_hopeless_exactly_when_the_search_finds_no_room_on_the_empty_machine(case: Case) -> None:
    machine, free, request = case
    answer = place(machine, free, request)
    if not isinstance(answer, Placement):
        assert answer.never == (best_key(machine, free_of(machine, Ledger()), request) is None)


def test_of_equally_good_cpus_sharing_vms_get_those_that_others_use_least_or_nearly_so() -> None:
    compared = used = least = 0
    for number in range(rounds(2_800, quick=560)):
        machine, free, request = random_case(number, 9)
        request = replace(request, options=replace(request.options, smt=Smt.PREFER))
        answer = place(machine, free, request)
        if request.options.policy not in (Policy.SHARE, Policy.IMMOVABLE) or not free.uses:
            continue
        if isinstance(answer, Placement):
            judge = Judge(machine, free, request)
            best = min(
                (key, others_on(free, cpus))
                for cpus in all_sets(free.pool, judge.need)
                for key in judge.sittings(cpus)
            )
            found = key_of_valid(machine, free, request, answer)
            if not levels_nest(machine):
                continue
            assert found == best[0], number
            compared += 1
            used += others_on(free, answer.cpus)
            least += best[1]
    assert compared > rounds(150, quick=20)
    assert least > rounds(60, quick=5)
    assert used <= 1.05 * least


@settings(max_examples=examples(150))
@given(cases(7, tangled=None))
def test_the_search_that_skips_like_cpus_finds_the_result_of_the_full_search(case: Case) -> None:
    machine, free, request = case
    judge = Judge(machine, free, request)
    usable = judge.usable(free.cpus if request.owns_cpus else free.pool)
    keys = [
        key
        for cpus in all_sets(usable, judge.need)
        if not judge.one_per_core or all((core & cpus).bit_count() <= 1 for core in machine.cores)
        for key in judge.sittings(cpus)
    ]
    assert best_key(machine, free, request) == min(keys, default=None)


@settings(max_examples=examples(50))
@given(cases(6, tangled=None))
def test_the_search_for_all_free_sets_at_once_finds_the_result_of_each_single_search(case: Case) -> None:
    machine, free, request = case
    keys = BestKeys(machine, free, request)
    for cpus in range(machine.cpus + 1):
        one = with_cpus(free, request, cpus)
        assert keys.key(request.vcpus, cpus) == best_key(machine, one, request)


def all_sets(cpus: int, count: int) -> list[int]:
    return [mask_of(chosen) for chosen in combinations(cpus_of(CpuMask(cpus)), count)]


def others_on(free: Free, cpus: int) -> int:
    return sum(count for cpu, count in free.uses if cpus >> cpu & 1)
