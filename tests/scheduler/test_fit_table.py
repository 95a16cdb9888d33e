"""The fit table computes what has changed, and nothing twice."""

from __future__ import annotations

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.node_choice import Candidate
from kvplace.core.free import Free
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request import Request
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.topology import Topology
from kvplace.nodes.node_machine import NOT_KNOWN, NodeMachine, NodeSnapshot, Unusable
from kvplace.scheduler import fit_table
from kvplace.scheduler.fit_table import FitTable
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.nodes.machines import EIGHT

TWO_SOCKETS = make_topology(
    packages=(make_package(0, CpuMask(0x0F)), make_package(1, CpuMask(0xF0))),
    numa_nodes=(make_numa_node(0, CpuMask(0x0F), 0), make_numa_node(1, CpuMask(0xF0), 0)),
    l3_groups=(CpuMask(0x0F), CpuMask(0xF0)),
    cores=EIGHT.cores,
)
A, B = NodeName("a"), NodeName("b")
SIX = Request(6)
"""On one socket."""


def snapshot(topology: Topology) -> NodeSnapshot:
    """Take a snapshot of a machine whose eight CPUs are free."""
    return NodeSnapshot(NodeMachine(topology, topology.allocatable), Free(CpuMask(0xFF), CpuMask(0xFF)))


def test_machines_with_equal_free_cpus_and_other_sockets_have_answers_of_their_own() -> None:
    nodes = {NodeName("one"): snapshot(EIGHT), NodeName("two"): snapshot(TWO_SOCKETS)}
    answers = FitTable(lambda node: nodes[node]).answers(nodes, SIX)
    assert isinstance(answers[NodeName("one")], Candidate)
    assert isinstance(answers[NodeName("two")], Refusal)


def test_a_node_is_asked_again_only_after_it_has_changed() -> None:
    asked: list[str] = []

    def snapshot_of(node: str) -> NodeSnapshot:
        asked.append(node)
        return snapshot(EIGHT)

    table = FitTable(snapshot_of)
    for _ in range(2):
        table.answers([NodeName("a"), NodeName("b")], SIX)
    assert asked == ["a", "b"]
    table.node_changed(NodeName("b"))
    table.answers([NodeName("a"), NodeName("b")], SIX)
    assert asked == ["a", "b", "b"]


def test_nodes_in_the_same_state_share_one_placement() -> None:
    nodes = {A: snapshot(EIGHT), B: snapshot(EIGHT)}
    answers = FitTable(lambda node: nodes[node]).answers(nodes, SIX)
    first, second = answers.values()
    assert isinstance(first, Candidate)
    assert isinstance(second, Candidate)
    assert first.placement is second.placement
    assert first == Candidate(A, EIGHT, first.placement, nodes[A].free, 6)


def test_the_request_and_the_state_that_were_not_asked_for_longest_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    computed: list[int] = []

    def snapshot_of(node: str) -> NodeSnapshot:
        asked.append(node)
        return snapshot(EIGHT)

    def place_and_count(topology: Topology, free: Free, request: Request) -> Placement | Refusal:
        computed.append(request.vcpus)
        return place(topology, free, request)

    monkeypatch.setattr(fit_table, "_REQUESTS", 2)
    monkeypatch.setattr(fit_table, "place", place_and_count)
    monkeypatch.setattr(fit_table, "_ANSWERS", 2)
    table = FitTable(snapshot_of)

    def ask(*sizes: int) -> tuple[int, list[int]]:
        asked.clear()
        computed.clear()
        for vcpus in sizes:
            table.answers([A], Request(vcpus))
        return len(asked), list(computed)

    assert ask(1, 2, 1, 3) == (3, [1, 2, 3])
    assert ask(1, 3) == (0, [])
    table.node_changed(A)
    assert ask(3, 2) == (2, [])
    assert ask(1) == (1, [1])  # its answer was the oldest of three


def test_only_what_a_narrowed_machine_could_not_hold_when_empty_never_fits() -> None:
    narrowed = NodeSnapshot(NodeMachine(EIGHT, CpuMask(0x3F)), Free(CpuMask(0x03), CpuMask(0x03)))
    table = FitTable(lambda node: narrowed)
    for vcpus, never in ((4, False), (6, False), (7, True)):
        answer = table.answers([A], Request(vcpus))[A]
        assert isinstance(answer, Refusal)
        assert answer.never is never


def test_nodes_that_cannot_be_used_are_refused_and_not_kept() -> None:
    state: list[NodeSnapshot | Unusable] = [NOT_KNOWN, snapshot(EIGHT)]
    table = FitTable(lambda node: state.pop(0))
    refusal = table.answers([NodeName("a")], SIX)[NodeName("a")]
    assert isinstance(refusal, Refusal)
    assert (refusal.message, refusal.never) == ("the node is not known to the API server", True)
    assert isinstance(table.answers([NodeName("a")], SIX)[NodeName("a")], Candidate)
