"""The synced cache: lists replace each other at once, and every difference is reported in order."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvplace.core.errors import Corrupt, Unavailable
from kvplace.core.scalars import NodeName
from kvplace.kube.object_records import NodeRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import NODES, Alive, Apply, Delete, Init, InitApply, InitDone, Interrupted
from tests.kube.faulty_cluster import FaultyCluster
from tests.kube.restored_cluster import RestoredCluster

A, B, C = (NodeRecord(NodeName(name), f"uid-{name}") for name in "abc")
A2 = NodeRecord(NodeName("a"), "uid-a", cpu_map="{}")


class Subscriber:
    """The changes that a subscriber got, as (old, new)."""

    def __init__(self) -> None:
        self.differences: list[tuple[NodeRecord | None, NodeRecord | None]] = []

    def __call__(self, old: NodeRecord | None, new: NodeRecord | None) -> None:
        self.differences.append((old, new))


@pytest.fixture
def store() -> Store[NodeName, NodeRecord]:
    return Store(NODES)


def test_nothing_is_shown_before_the_first_list_is_complete(store: Store[NodeName, NodeRecord]) -> None:
    subscriber = Subscriber()
    store.subscribe(subscriber)
    store.apply(Init())
    store.apply(InitApply(A))
    assert (dict(store.records), store.has_synced, subscriber.differences) == ({}, False, [])
    store.apply(InitDone())
    assert (dict(store.records), store.has_synced, subscriber.differences) == ({"a": A}, True, [(None, A)])


def test_a_store_knows_since_when_its_watch_is_quiet_and_why() -> None:
    now = 100.0
    store = Store(NODES, clock=lambda: now)
    store.apply(Init())
    failure = Unavailable("the server is away")
    now += 7
    store.apply(Interrupted(failure))
    assert (store.silent_s, store.failing_s, store.failure) == (7, 0, failure)
    now += 5
    store.apply(Interrupted(failure))
    assert (store.silent_s, store.failing_s) == (12, 5)
    store.apply(Alive())
    assert (store.silent_s, store.failing_s, store.failure) == (0, 0, None)


async def test_a_process_that_remembers_its_writes_ends_when_the_past_has_changed(
    store: Store[NodeName, NodeRecord],
) -> None:
    cluster = RestoredCluster()
    with pytest.raises(Corrupt, match="gone back"):
        await store.run_in_one_past(cluster)
    following = asyncio.create_task(store.run(cluster))
    await store.wait_until_synced()
    following.cancel()


def test_a_new_list_replaces_the_old_one_and_reports_deletions_first(
    store: Store[NodeName, NodeRecord],
) -> None:
    for event in (Init(), InitApply(A), InitApply(B), InitDone()):
        store.apply(event)
    subscriber = Subscriber()
    store.subscribe(subscriber)
    subscriber.differences.clear()
    for event in (Init(), InitApply(A2), InitApply(C)):
        store.apply(event)
    assert dict(store.records) == {"a": A, "b": B}
    store.apply(InitDone())
    assert dict(store.records) == {"a": A2, "c": C}
    assert subscriber.differences == [(B, None), (A, A2), (None, C)]


def test_a_list_that_begins_again_drops_the_unfinished_one(store: Store[NodeName, NodeRecord]) -> None:
    for event in (Init(), InitApply(A), Init(), InitApply(B), InitDone()):
        store.apply(event)
    assert dict(store.records) == {"b": B}


def test_changes_are_reported_with_the_record_before(store: Store[NodeName, NodeRecord]) -> None:
    subscriber = Subscriber()
    store.subscribe(subscriber)
    for event in (Init(), InitDone(), Apply(A), Apply(A2), Delete(A2), Delete(C)):
        store.apply(event)
    assert subscriber.differences == [(None, A), (A, A2), (A2, None)]
    assert store.get(NodeName("a")) is None


def test_a_late_subscriber_gets_the_existing_records(store: Store[NodeName, NodeRecord]) -> None:
    for event in (Init(), InitApply(A), InitApply(B), InitDone()):
        store.apply(event)
    subscriber = Subscriber()
    store.subscribe(subscriber)
    assert subscriber.differences == [(None, A), (None, B)]


def test_a_failing_subscriber_is_logged_and_does_not_stop_others(
    store: Store[NodeName, NodeRecord], caplog: pytest.LogCaptureFixture
) -> None:
    def failing(old: NodeRecord | None, new: NodeRecord | None) -> None:
        raise ValueError("a mistake")

    subscriber = Subscriber()
    store.subscribe(failing)
    store.subscribe(subscriber)
    with caplog.at_level(logging.ERROR):
        for event in (Init(), InitApply(A), InitDone()):
            store.apply(event)
    assert subscriber.differences == [(None, A)]
    assert "nodes" in caplog.text


async def test_it_follows_a_cluster_until_that_is_closed(store: Store[NodeName, NodeRecord]) -> None:
    cluster = FaultyCluster()
    cluster.create_node("a")
    follower = asyncio.create_task(store.run(cluster))
    await store.wait_until_synced()
    assert list(store.records) == ["a"]
    await cluster.close()
    await follower
