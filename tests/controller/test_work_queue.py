"""Nodes become due at the earliest of their times, each replica's a little apart."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from kvplace.controller.controller import ControllerSettings, WorkQueue
from kvplace.controller.reconciler import Reconciler
from kvplace.core.scalars import NodeName
from tests.controller.replicas import replica
from tests.kube.faulty_cluster import FaultyCluster

A, B = NodeName("a"), NodeName("b")


def queue(replica: str = "one", spread_s: float = 0.0) -> WorkQueue:
    return WorkQueue(replica=replica, spread_s=spread_s)


def now() -> float:
    return asyncio.get_running_loop().time()


async def nothing_due(one: WorkQueue) -> bool:
    """Whether no node becomes due, however long one waits."""
    try:
        async with asyncio.timeout(1000.0):
            await one.take()
    except TimeoutError:
        return True
    return False


async def test_nodes_are_taken_when_they_are_due_and_once() -> None:
    one, began = queue(), now()
    one.add(A, after_s=5.0)
    one.add(B)
    assert await one.take() == B
    assert now() == began
    assert await one.take() == A
    assert now() == began + 5.0
    assert await nothing_due(one)


@pytest.mark.parametrize(("first", "second"), [(1.0, 5.0), (5.0, 1.0)])
async def test_of_two_times_the_earlier_counts(first: float, second: float) -> None:
    one, began = queue(), now()
    one.add(A, after_s=first)
    one.add(A, after_s=second)
    assert await one.take() == A
    assert now() == began + 1.0
    assert await nothing_due(one)


async def test_a_node_that_is_added_while_another_is_waited_for_is_taken_at_its_own_time() -> None:
    one, began = queue(), now()
    one.add(A, after_s=5.0)
    taking = asyncio.create_task(one.take())
    await asyncio.sleep(1.0)
    one.add(B, after_s=1.0)
    assert await taking == B
    assert now() == began + 2.0


async def test_a_node_that_becomes_due_while_it_is_worked_on_is_taken_after_that() -> None:
    one = queue()
    one.add(A)
    assert await one.take() == A
    one.add(A)
    one.add(B)
    assert await one.take() == B
    assert await nothing_due(one)
    one.done(A)
    assert await one.take() == A
    one.done(A)
    assert await nothing_due(one)


async def test_each_replica_has_its_own_order_within_the_spread() -> None:
    orders = set()
    for name in ("one", "two", "three", "four"):
        each, began = queue(name, spread_s=0.2), now()
        for number in range(10):
            each.add(NodeName(f"node-{number}"))
        order: list[NodeName] = []
        while len(order) < 10:
            order.append(await each.take())
        assert now() - began <= 0.2
        orders.add(tuple(order))
    assert len(orders) == 4


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
