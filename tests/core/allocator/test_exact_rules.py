"""Rules that every answer keeps on machines of up to 64 CPUs, where no search can find the best one.

More room never makes an answer worse, the numbers of the CPUs never decide how good it is, and no answer
depends on what was asked before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvplace.core.allocator import layout
from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import Policy, Request, Scope
from kvplace.core.scalars import CpuId, CpuMask, NumaId
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import Key, decided, levels_nest
from tests.core.allocator.random_cases import (
    random_case,
    random_free,
    random_machine,
    random_request,
    scarce_memory_case,
)
from tests.core.allocator.validity import key_of_valid
from tests.core.machines import (
    GIB,
    SPREAD_SCOPES,
    frees,
    make_numa_node,
    make_package,
    make_topology,
    requests,
    subsets,
    topologies,
)
from tests.profiles import examples, rounds

Case = tuple[Topology, Free, Request]
Thing = TypeVar("Thing")

cases = topologies(most_cpus=64, tangled=None).flatmap(
    lambda machine: st.tuples(st.just(machine), frees(machine), requests(most_vcpus=40))
)
crowded = st.tuples(
    st.sampled_from([random_case, scarce_memory_case]), st.integers(0, 1 << 32), st.integers(4, 64)
).map(lambda drawn: drawn[0](drawn[1], drawn[2]))


def key(case: Case) -> Key | None:
    """The key of the answer, checked by rules that are not the allocator's; None for a refusal."""
    answer = place(*case)
    return key_of_valid(*case, answer) if isinstance(answer, Placement) else None


@pytest.mark.parametrize("question", [random_case, scarce_memory_case])
def test_every_placement_on_a_crowded_machine_keeps_every_rule(question: Callable[[int, int], Case]) -> None:
    placed = [number for number in range(rounds(400, quick=80)) if key(question(number, 64)) is not None]
    assert len(placed) > rounds(80, quick=12)


@settings(max_examples=examples(300))
@given(cases)
def test_every_placement_on_any_machine_keeps_every_rule(case: Case) -> None:
    key(case)


@given(cases | crowded, st.data())
def test_more_room_never_makes_an_answer_worse(case: Case, data: st.DataObject) -> None:
    machine, free, request = case
    before = key(case)
    assume(before is not None)
    assert before is not None
    pool = free.pool | data.draw(subsets(machine.allocatable))
    more = replace(
        free,
        cpus=free.cpus | data.draw(subsets(pool)),
        pool=pool,
        memory=tuple((node, count + data.draw(st.integers(0, 4)) * GIB) for node, count in free.memory),
        huge_pages=tuple(
            (n, size, count + data.draw(st.integers(0, 2))) for n, size, count in free.huge_pages
        ),
    )
    after = key((machine, more, request))
    assert after is not None
    # Policy `numa` takes all the CPUs of its nodes, however many they become. Where levels cross, a VM that
    # fits is placed, and not always at the best place.
    if request.options.policy is not Policy.NUMA and levels_nest(machine):
        assert after <= before


@given(cases | crowded)
def test_a_smaller_vm_fits_where_a_larger_one_does(case: Case) -> None:
    machine, free, request = case
    # Few cases are left out, so that Hypothesis does not run out of them.
    scope = Scope.ANY if request.options.scope in SPREAD_SCOPES else request.options.scope
    request = replace(request, vcpus=max(2, request.vcpus), options=replace(request.options, scope=scope))
    assume(key((machine, free, request)) is not None)
    assert key((machine, free, replace(request, vcpus=request.vcpus - 1))) is not None
    assert key((machine, free, replace(request, vcpus=1))) is not None


@given(cases | crowded, st.integers(0, 1 << 32))
def test_the_numbers_of_cpus_and_nodes_do_not_decide_how_good_an_answer_is(case: Case, seed: int) -> None:
    machine, free, request = case
    again = key((*renumbered(machine, free, Random(seed)), request))
    assert decided(request, again) == decided(request, key(case))


@settings(max_examples=examples(40))
@given(st.integers(0, 1 << 32))
def test_no_answer_depends_on_earlier_questions(seed: int) -> None:
    chance = Random(seed)
    machine = random_machine(chance, 24)
    questions = []
    for _ in range(6):
        free = random_free(chance, machine)
        questions.append((free, random_request(chance, machine, free)))
    answers = [place(machine, *question) for question in questions]
    other = replace(machine, packages=tuple(reversed(machine.packages)))
    for free, request in questions:
        place(other, free, request)
    assert [place(machine, *question) for question in reversed(questions)] == list(reversed(answers))


@given(cases | crowded)
def test_a_vm_never_fits_only_when_the_empty_machine_has_no_room_for_it(case: Case) -> None:
    machine, _, request = case
    answer = place(*case)
    assume(isinstance(answer, Refusal))
    assert isinstance(answer, Refusal)
    empty = place(machine, free_of(machine, Ledger()), request)
    assert answer.never == isinstance(empty, Refusal)


def test_many_machines_together_remember_no_more_than_one_and_answer_as_before() -> None:
    chance = Random(7)
    machines = [random_machine(chance, 40) for _ in range(12)]
    questions = []
    for _ in range(40):
        for machine in machines:
            free = random_free(chance, machine)
            questions.append((machine, free, random_request(chance, machine, free)))
    answers = [place(*question) for question in questions]
    with (
        patch.object(layout, "_layouts", {}),
        patch.object(layout, "_MOST_COUNTS", 240),
        patch.object(layout, "_STATES_KEPT", 0),
    ):
        assert [place(*question) for question in questions] == answers
        for machine in machines:
            known = layout.layout_of(machine)
            assert len(known.l3_parts) + len(known.part_counts) <= 20


def renumbered(machine: Topology, free: Free, chance: Random) -> tuple[Topology, Free]:
    """The same machine, with everything called and listed otherwise."""
    cpus = list(cpus_of(machine.cpus))
    number = dict(zip(cpus, map(CpuId, chance.sample(range(2 * len(cpus)), len(cpus))), strict=True))
    ids = [node.id for node in machine.numa_nodes]
    new_id = dict(zip(ids, map(NumaId, chance.sample(range(2 * len(ids)), len(ids))), strict=True))

    def anew(mask: CpuMask) -> CpuMask:
        return mask_of(number[cpu] for cpu in cpus_of(mask))

    def shuffled(items: Sequence[Thing]) -> tuple[Thing, ...]:
        return tuple(chance.sample(items, len(items)))

    other = make_topology(
        packages=shuffled([make_package(package.id, anew(package.cpus)) for package in machine.packages]),
        numa_nodes=shuffled(
            [
                make_numa_node(
                    new_id[node.id],
                    anew(node.cpus),
                    node.memory,
                    node.huge_pages,
                    {new_id[far]: distance for far, distance in node.distances.items() if far in new_id},
                )
                for node in machine.numa_nodes
            ]
        ),
        l3_groups=shuffled([anew(l3) for l3 in machine.l3_groups]),
        cores=shuffled([anew(core) for core in machine.cores]),
        reserved=anew(machine.reserved),
        isolated=anew(machine.isolated),
    )
    return other, replace(
        free,
        cpus=anew(free.cpus),
        pool=anew(free.pool),
        uses=tuple(sorted((number[cpu], count) for cpu, count in free.uses)),
        memory=tuple((new_id[node], count) for node, count in free.memory),
        huge_pages=tuple((new_id[node], size, count) for node, size, count in free.huge_pages),
    )
