"""The answers of many nodes are compared in a turn of their own: with thousands, each step takes its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvplace.core import search_budget
from kvplace.scheduler import extender, fit_table
from kvplace.scheduler.extender import ExtenderSettings, Mode
from kvplace.scheduler.fit_table import FitTable
from tests.controller.replicas import asking_pod, replica
from tests.event_loop_turns import with_turns
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps in their order; turns of others are added by their taker."""
    monkeypatch.setattr(search_budget, "STEPS_OF_A_TURN", 1)
    found: list[str] = []

    def note(what: str, where: object, name: str) -> None:
        work: Callable[..., object] = getattr(where, name)

        def noted(*args: Any) -> object:
            done = work(*args)
            found.append(what)
            return done

        monkeypatch.setattr(where, name, noted)

    for name in ("_examined", "_answers"):
        note("all nodes checked", FitTable, name)
    note("refusals grouped", fit_table, "grouped_by")
    note("refusals grouped", extender, "grouped")
    note("nodes scored", extender, "scores")
    return found


@pytest.fixture
def cluster() -> FaultyCluster:
    """Nodes that all have different numbers of free CPUs."""
    made = FaultyCluster()
    for number in range(7):
        made.create_node(f"n{number}", cpu_map=f'{{"socket0": ["0-{number}"]}}', topology=EIGHT)
    return made


@pytest.mark.parametrize("mode", Mode)
async def test_the_reasons_of_nodes_of_which_none_can_hold_a_vm_are_grouped_in_a_turn_of_their_own(
    cluster: FaultyCluster, happened: list[str], mode: Mode
) -> None:
    async with replica(cluster, extending=ExtenderSettings(mode=mode)) as one:
        asking = one.filter(asking_pod(cluster, "vm", 8))
        answer, _ = await with_turns(asking, lambda: happened.append("turn of others"))
    assert answer.names == []
    grouped = happened.index("refusals grouped")
    assert happened[grouped - 2 : grouped] == ["all nodes checked", "turn of others"]


async def test_nodes_are_scored_in_a_turn_of_their_own(cluster: FaultyCluster, happened: list[str]) -> None:
    async with replica(cluster, extending=ExtenderSettings(mode=Mode.ADVISE)) as one:
        asking = one.scores(asking_pod(cluster, "vm", 4))
        await with_turns(asking, lambda: happened.append("turn of others"))
    scored = happened.index("nodes scored")
    assert happened[scored - 2 : scored] == ["all nodes checked", "turn of others"]
