"""The fit table finds the best node without placing on all of them, and computes nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest

from kvplace.core import search_budget
from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.node_choice import (
    Candidate,
    Fit,
    GroupedRefusals,
    Strategy,
    best_candidate,
    grouped,
    grouped_by,
    near_enough,
)
from kvplace.core.free_resources import Free
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import Request
from kvplace.core.scalars import Bytes, CpuMask, NodeName, NumaId
from kvplace.core.topology import Topology
from kvplace.kube.concurrency import Turns
from kvplace.nodes import node_machine
from kvplace.nodes.node_machine import NOT_KNOWN, NodeMachine, NodeSnapshot, Unusable
from kvplace.scheduler import fit_table, ranking
from kvplace.scheduler.fit_table import FitTable
from kvplace.scheduler.ranking import NodeState, NodeStates
from tests.core.allocator.random_cases import random_case, random_free, random_request
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.event_loop_turns import with_turns
from tests.nodes.machines import EIGHT
from tests.profiles import rounds

T = TypeVar("T")
TWO_SOCKETS = make_topology(
    packages=(make_package(0, CpuMask(0x0F)), make_package(1, CpuMask(0xF0))),
    numa_nodes=(make_numa_node(0, CpuMask(0x0F), 0), make_numa_node(1, CpuMask(0xF0), 0)),
    l3_groups=(CpuMask(0x0F), CpuMask(0xF0)),
    cores=EIGHT.cores,
)
A, B, C = NodeName("a"), NodeName("b"), NodeName("c")
SIX = Request(6)
"""On one socket."""
ALL = CpuMask(0xFF)


def snapshot(topology: Topology, free: CpuMask = ALL) -> NodeSnapshot:
    """Take a snapshot of a machine with these CPUs free."""
    return NodeSnapshot(NodeMachine(topology), Free(free, free))


def result(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end."""
    return asyncio.run(work)


def table_of(snapshot_of: Callable[[NodeName], NodeSnapshot | Unusable]) -> FitTable:
    return FitTable(snapshot_of, Strategy.PACK)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the VMs that were placed on some machine."""
    found: list[int] = []

    def place_and_count(topology: Topology, free: Free, request: Request) -> Placement | Refusal:
        found.append(request.vcpus)
        return place(topology, free, request)

    monkeypatch.setattr(node_machine, "place", place_and_count)
    return found


def test_machines_with_equal_free_cpus_and_other_sockets_have_answers_of_their_own() -> None:
    nodes = {NodeName("one"): snapshot(EIGHT), NodeName("two"): snapshot(TWO_SOCKETS)}
    answers = result(table_of(nodes.__getitem__).answers(nodes, SIX, Turns()))
    assert isinstance(answers[NodeName("one")], Candidate)
    assert isinstance(answers[NodeName("two")], Refusal)


def test_a_node_is_described_again_only_after_it_has_changed() -> None:
    asked: list[str] = []

    def snapshot_of(node: NodeName) -> NodeSnapshot:
        asked.append(node)
        return snapshot(EIGHT)

    table = table_of(snapshot_of)
    for request in (SIX, Request(2)):
        result(table.answers([A, B], request, Turns()))
        result(table.best([A, B], request))
    assert sorted(asked) == ["a", "b"]
    table.node_changed(B)
    result(table.best([A, B], SIX))
    assert asked[2:] == ["b"]


def test_a_state_in_which_another_node_has_been_is_not_placed_again(placed: list[int]) -> None:
    nodes = {A: snapshot(EIGHT), B: snapshot(TWO_SOCKETS)}
    table = table_of(nodes.__getitem__)
    first = result(table.best([A], SIX))
    nodes[A] = snapshot(TWO_SOCKETS)
    table.node_changed(A)
    result(table.best([A, B], SIX))
    nodes[B] = snapshot(EIGHT)
    table.node_changed(B)
    assert placed.count(6) == len(placed)
    before = len(placed)
    again = result(table.best([B], SIX))
    assert first is not None
    assert again == Candidate(B, first.fit)
    assert len(placed) == before


def test_nodes_in_the_same_state_share_one_placement(placed: list[int]) -> None:
    nodes = {A: snapshot(EIGHT), B: snapshot(EIGHT)}
    answers = result(table_of(nodes.__getitem__).answers(nodes, SIX, Turns()))
    first, second = answers.values()
    assert isinstance(first, Candidate)
    assert isinstance(second, Candidate)
    assert placed == [6]
    assert first.fit is second.fit
    assert first == Candidate(A, Fit(EIGHT, first.placement, nodes[A].free, 6))


def test_a_node_that_comes_back_to_its_state_is_not_placed_on_again(placed: list[int]) -> None:
    nodes = {A: snapshot(EIGHT)}
    table = table_of(nodes.__getitem__)
    for _ in range(2):
        result(table.best([A], SIX))
        table.node_changed(A)  # as when a hold becomes a claim: what is free stays as it is
    assert placed == [6]


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("seed", range(rounds(12, quick=2)))
def test_the_best_node_is_the_one_that_placing_on_every_node_gives(seed: int, strategy: Strategy) -> None:
    chance = Random(seed)
    machines = [random_case(seed * 10 + number, 16)[0] for number in range(3)]
    states: dict[NodeName, NodeSnapshot] = {}

    def changed(name: NodeName) -> None:
        topology = chance.choice(machines)
        machine = NodeMachine(topology)
        states[name] = NodeSnapshot(machine, random_free(chance, topology))

    names = [NodeName(f"node-{number}") for number in range(24)]
    for name in names:
        changed(name)
    table = FitTable(states.__getitem__, strategy)
    state = states[names[0]]
    requests = [random_request(chance, state.machine.topology, state.free) for _ in range(4)]
    for _ in range(40):
        request = chance.choice(requests)
        asked = chance.sample(names, chance.choice([1, 5, 24]))
        exhaustive = []
        for name in asked:
            topology, free = states[name].machine.topology, states[name].free
            found = place(topology, free, request)
            if isinstance(found, Placement):
                exhaustive.append(Candidate(name, Fit(topology, found, free, request.vcpus)))
        best = best_candidate(exhaustive, strategy)
        assert result(table.best(asked, request)) == best
        others = [candidate for candidate in exhaustive if candidate != best]
        next_best = best_candidate(others, strategy)
        assert result(table.two_best(asked, request)) == (best, next_best)
        if best is not None:
            preferred = {NodeName("elsewhere"), *chance.sample(names, chance.choice([1, 5]))}
            limit = near_enough(best.fit.standing(strategy), strategy)
            near = [one for one in exhaustive if one.node in preferred and one.fit.standing(strategy) < limit]
            chosen = best if best.node in preferred else best_candidate(near, strategy) or best
            assert result(table.best(asked, request, preferred=preferred)) == chosen
        for name in chance.sample(names, chance.choice([0, 1, 6])):
            changed(name)
            table.node_changed(name)


def test_only_nodes_that_can_be_the_best_are_placed_on(placed: list[int]) -> None:
    nodes = {NodeName(f"node-{free}"): snapshot(EIGHT, CpuMask((1 << free) - 1)) for free in range(9)}
    best = result(table_of(nodes.__getitem__).best(nodes, Request(4)))
    assert best is not None
    assert best.node == "node-4"
    assert placed == [4]


def test_the_next_best_node_costs_one_placement_more(placed: list[int]) -> None:
    nodes = {NodeName(f"node-{free}"): snapshot(EIGHT, CpuMask((1 << free) - 1)) for free in range(9)}
    best, next_best = result(table_of(nodes.__getitem__).two_best(nodes, Request(4)))
    assert best is not None
    assert next_best is not None
    assert (best.node, next_best.node) == ("node-4", "node-5")
    assert placed == [4, 4]


def test_nothing_is_placed_where_counting_shows_that_nothing_fits(placed: list[int]) -> None:
    nodes = {A: snapshot(EIGHT, CpuMask(0x3F)), B: snapshot(TWO_SOCKETS, CpuMask(0x77))}
    assert result(table_of(nodes.__getitem__).best(nodes, Request(7))) is None
    assert placed == []


def test_the_request_that_was_not_asked_for_longest_is_dropped(
    monkeypatch: pytest.MonkeyPatch, placed: list[int]
) -> None:
    monkeypatch.setattr(fit_table, "_KEPT", 5)  # a bound and a placement of each request
    monkeypatch.setattr(ranking, "_REMEMBERED", 0)
    table = table_of(lambda node: snapshot(EIGHT))

    def ask(*sizes: int) -> list[int]:
        placed.clear()
        for vcpus in sizes:
            result(table.best([A], Request(vcpus)))
        return list(placed)

    assert ask(1, 2, 1, 3, 1) == [1, 2, 3]
    assert ask(2) == [2]
    assert ask(1) == []


def test_a_node_that_changes_between_two_turns_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_budget, "STEPS_OF_A_TURN", 1)
    nodes = {A: snapshot(EIGHT), B: snapshot(EIGHT, CpuMask(0x3F)), C: snapshot(EIGHT)}
    table = table_of(nodes.__getitem__)

    async def choose() -> list[Candidate | None]:
        first = asyncio.create_task(table.best(nodes, SIX))
        for _ in range(5):
            await asyncio.sleep(0)  # the nodes have been counted
        assert not first.done()
        nodes[B] = snapshot(EIGHT, CpuMask(0x1F))
        nodes[C] = snapshot(EIGHT, CpuMask(0x7F))
        table.node_changed(B)
        table.node_changed(C)
        return [await first, await table.best(nodes, SIX)]

    best, again = result(choose())
    assert best is not None
    assert best.node == C
    assert best == again


def test_others_have_their_turn_while_many_nodes_are_checked() -> None:
    nodes = {NodeName(f"node-{number}"): snapshot(EIGHT, CpuMask(number)) for number in range(256)}
    table = table_of(nodes.__getitem__)
    answers, turns = result(with_turns(table.answers(nodes, SIX, Turns())))
    assert answers.keys() == nodes.keys()
    assert turns > 10


def test_states_that_a_turn_leaves_are_not_listed_again_by_each_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = 0
    since = NodeStates.since

    def since_and_count(states: NodeStates, number: int) -> list[NodeState]:
        nonlocal listed
        found = since(states, number)
        listed += len(found)
        return found

    nodes = {NodeName(f"node-{number}"): snapshot(EIGHT, CpuMask(number)) for number in range(256)}
    table = table_of(nodes.__getitem__)
    result(table.best(nodes, SIX))
    monkeypatch.setattr(NodeStates, "since", since_and_count)
    result(table.answers(nodes, SIX, Turns()))
    assert 256 <= listed < 2 * 256


def test_answers_are_those_of_the_moment_of_the_return() -> None:
    nodes = {NodeName(f"node-{number}"): snapshot(EIGHT, CpuMask(number)) for number in range(256)}
    table = table_of(nodes.__getitem__)

    async def answer() -> dict[NodeName, Candidate | Refusal]:
        answers = asyncio.create_task(table.answers(nodes, SIX, Turns()))
        for number in range(255, 0, -1):
            await asyncio.sleep(0)
            if answers.done():
                break
            name = NodeName(f"node-{number}")
            nodes[name] = nodes[NodeName(f"node-{255 - number}")]
            table.node_changed(name)
        assert number < 250
        return await answers

    assert result(answer()) == result(table_of(nodes.__getitem__).answers(nodes, SIX, Turns()))


def test_why_no_node_can_hold_a_vm_is_computed_once_until_a_node_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = 0

    def group_and_count(*asked: Any) -> GroupedRefusals:
        nonlocal computed
        computed += 1
        return grouped_by(*asked)

    monkeypatch.setattr(fit_table, "grouped_by", group_and_count)
    nodes: dict[NodeName, NodeSnapshot | Unusable] = {
        A: snapshot(EIGHT, CpuMask(0x1F)),
        B: snapshot(EIGHT, CpuMask(0x0F)),
        C: NOT_KNOWN,
    }
    table = table_of(nodes.__getitem__)

    def summary(*names: NodeName) -> str:
        found = result(table.refusals(list(names), SIX))
        answers = result(table_of(nodes.__getitem__).answers(names, SIX, Turns()))
        refusals = {node: answer for node, answer in answers.items() if isinstance(answer, Refusal)}
        assert (found is None) == (len(refusals) < len(answers))
        assert found is None or found == grouped({node: refusals[node] for node in names})
        return found.summary if found is not None else ""

    for _ in range(3):
        assert "best 5 on a" in summary(A, B)
    assert computed == 1
    assert "best 4 on b" in summary(B)
    assert summary(A, C).count("1 node:") == 2
    before = computed
    nodes[A] = snapshot(EIGHT, CpuMask(0x3))
    table.node_changed(A)
    assert "best 4 on b" in summary(A, B)
    nodes[A] = snapshot(EIGHT)
    table.node_changed(A)
    assert summary(A, B) == ""
    nodes[A] = snapshot(EIGHT, CpuMask(0x1F))
    table.node_changed(A)
    assert "best 5 on a" in summary(A, B)
    assert computed == before + 2


@pytest.mark.parametrize("seed", range(rounds(40, quick=4)))
def test_the_reasons_of_many_nodes_are_those_that_each_gives_alone(seed: int) -> None:
    chance = Random(seed)
    machines = [random_case(seed * 10 + number, 16)[0] for number in range(3)]
    nodes: dict[NodeName, NodeSnapshot] = {}
    for number in range(24):
        topology = chance.choice(machines)
        given = topology.allocatable
        if chance.random() < 0.3:
            given = CpuMask(given & chance.getrandbits(16))
        left = random_free(chance, topology)
        free = replace(left, cpus=CpuMask(left.cpus & given), pool=CpuMask(left.pool & given))
        nodes[NodeName(f"node-{number}")] = NodeSnapshot(NodeMachine(topology.giving_out(given)), free)
    table = table_of(nodes.__getitem__)
    state = chance.choice(list(nodes.values()))
    for _ in range(20):
        request = random_request(chance, state.machine.topology, state.free)
        for vcpus in (request.vcpus, 2 * request.vcpus, 64):
            asked = replace(request, vcpus=vcpus)
            answers = result(table_of(nodes.__getitem__).answers(nodes, asked, Turns()))
            refusals = {node: answer for node, answer in answers.items() if isinstance(answer, Refusal)}
            together = grouped(refusals) if len(refusals) == len(nodes) else None
            assert result(table.refusals(nodes, asked)) == together


@pytest.mark.parametrize(
    "asked", [Request(8), Request(6, memory=Bytes(1 << 40)), Request(6, huge_pages={Bytes(1 << 30): 1})]
)
def test_turns_of_one_step_come_to_an_end_where_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, asked: Request
) -> None:
    nodes = {NodeName(f"node-{number}"): snapshot(EIGHT, CpuMask(number)) for number in range(128)}
    for name, state in nodes.items():
        nodes[name] = replace(state, free=replace(state.free, memory=((NumaId(0), Bytes(1 << 30)),)))
    at_once = result(table_of(nodes.__getitem__).refusals(nodes, asked))
    monkeypatch.setattr(search_budget, "STEPS_OF_A_TURN", 1)
    table = table_of(nodes.__getitem__)
    assert result(table.best(nodes, asked)) is None
    assert result(table.refusals(nodes, asked)) == at_once
    assert at_once is not None


def test_thousands_of_refusals_by_count_are_put_into_words_once_for_each_kind_of_machine(
    placed: list[int],
) -> None:
    nodes = {NodeName(f"node-{number}"): snapshot(EIGHT, CpuMask(number)) for number in range(63)}
    table = table_of(nodes.__getitem__)
    groups = result(table.refusals(nodes, SIX))
    assert groups is not None
    assert "best 5 on node-31" in groups.summary
    assert len(placed) <= 2


def test_only_a_vm_that_a_narrowed_empty_machine_cannot_hold_never_fits() -> None:
    narrowed = NodeSnapshot(NodeMachine(EIGHT.giving_out(CpuMask(0x3F))), Free(CpuMask(0x03), CpuMask(0x03)))
    table = table_of(lambda node: narrowed)
    for vcpus, never in ((4, False), (6, False), (7, True)):
        answer = result(table.answers([A], Request(vcpus), Turns()))[A]
        assert isinstance(answer, Refusal)
        assert answer.never is never


def test_nodes_that_cannot_be_used_are_refused_until_they_change() -> None:
    state: list[NodeSnapshot | Unusable] = [NOT_KNOWN, snapshot(EIGHT)]
    table = table_of(lambda node: state.pop(0))
    refusal = result(table.answers([A], SIX, Turns()))[A]
    assert isinstance(refusal, Refusal)
    assert (refusal.message, refusal.never) == ("the node is not known to the API server", True)
    table.node_changed(A)
    assert isinstance(result(table.answers([A], SIX, Turns()))[A], Candidate)


def test_nodes_that_are_gone_are_forgotten() -> None:
    nodes: dict[NodeName, NodeSnapshot | Unusable] = {A: snapshot(EIGHT)}
    table = table_of(lambda node: nodes.get(node, NOT_KNOWN))
    kept = []
    for number in range(300):
        name = NodeName(f"node-{number}")
        nodes[name] = snapshot(EIGHT, CpuMask(number & 0x7F))
        result(table.best([A, name], SIX))
        result(table.answers([A, name], SIX, Turns()))
        del nodes[name]
        table.node_changed(name)
        result(table.answers([A, name], SIX, Turns()))  # kube-scheduler still names it
        kept.append(table.kept)
    assert max(kept) < 150
