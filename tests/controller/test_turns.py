"""The controller leaves turns to binds and admission, however many nodes are due."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from kvplace.controller.controller import ControllerSettings
from kvplace.controller.reconciler import Reconciler
from kvplace.core.scalars import NodeName
from tests.controller.replicas import replica
from tests.kube.faulty_cluster import FaultyCluster


async def test_of_many_nodes_that_are_due_at_once_one_begins_in_each_turn(
    cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[NodeName] = []

    async def reconcile(_: Reconciler, node: NodeName) -> None:
        begun.append(node)

    monkeypatch.setattr(Reconciler, "reconcile", reconcile)
    async with replica(cluster, settings=ControllerSettings(spread_s=0.0, round_s=3600.0)) as one:
        await asyncio.sleep(1.0)
        begun.clear()
        seen = [0]
        for number in range(50):
            one.controller._queue.add(NodeName(f"due-{number}"))
        while len(begun) < 50:
            await asyncio.sleep(0)
            seen.append(len(begun))
    assert max(after - before for before, after in pairwise(seen)) <= 1
