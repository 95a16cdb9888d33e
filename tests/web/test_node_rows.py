"""The rows of nodes, and how a reader learns what he missed."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from harness.waiting import PATIENCE_S
from kvplace.core.errors import Unavailable
from kvplace.core.scalars import NodeName
from kvplace.kube.concurrency import Turns
from kvplace.kube.object_records import Condition
from kvplace.kube.store import Store
from kvplace.kube.watches import AGENT_PODS, AGENTS, NODES, Alive, Interrupted
from kvplace.nodes.node_cache import NodeCache, running_node_cache
from kvplace.service.process import in_background
from kvplace.web.documents import GONE, Agents
from kvplace.web.feed import RELOAD, Feed
from kvplace.web.node_rows import NodeRows
from tests.nodes.machines import TWO
from tests.web.staged_cluster import StagedCluster, cluster_of

Json = dict[str, Any]


@contextlib.asynccontextmanager
async def rows_of(stage: StagedCluster) -> AsyncIterator[tuple[NodeRows, NodeCache]]:
    pods = Store(AGENT_PODS, AGENTS)
    async with running_node_cache(stage.cluster) as cache, in_background(pods.run(stage.cluster)):
        agents = Agents(pods)
        rows = NodeRows(cache, agents)
        await agents.announce(cache.nodes.records.keys())
        await rows.refresh()
        yield rows, cache


async def refreshed(rows: NodeRows) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await rows.stale.wait()
    await rows.refresh()


def changed(rows: NodeRows, revision: int) -> list[str]:
    changes = rows.since(revision)
    assert changes is not None
    return sorted(msgspec.json.decode(row)["name"] for row in changes.rows)


def row(rows: NodeRows, name: str) -> Json:
    (found,) = (one for one in map(msgspec.json.decode, rows.all()) if one["name"] == name)
    document: Json = found
    return document


async def test_a_row_gives_the_free_cpus_and_the_largest_free_blocks() -> None:
    stage = StagedCluster()
    stage.add_node("worker", TWO)
    async with rows_of(stage) as (rows, _):
        assert row(rows, "worker") == {
            "name": "worker",
            "vms": 0,
            "notPinned": 0,
            "moving": 0,
            "allocatable": 16,
            "free": 16,
            "numa": [[8, 8], [8, 8]],
            "freeBlocks": {"socket": [8, 4, 8], "numa": [8, 4, 8], "l3": [8, 4, 8]},
        }
        await stage.run_vm("worker", 4)
        await refreshed(rows)
        after = row(rows, "worker")
        assert (after["vms"], after["free"], sorted(after["numa"])) == (1, 12, [[4, 8], [8, 8]])
        totals = rows.totals()
        assert (totals["nodes"], totals["usable"], totals["free"], totals["vms"]) == (1, 1, 12, 1)
        assert totals["freeBlocks"]["numa"]["nodesWith"] == [1, 1, 1, 1, 0, 0, 0, 0]


async def test_a_node_without_a_description_states_why_nothing_is_placed_there() -> None:
    stage = StagedCluster()
    stage.cluster.create_node("bare")
    async with rows_of(stage) as (rows, _):
        assert "describes the node" in row(rows, "bare")["problem"]
        assert (rows.totals()["nodes"], rows.totals()["usable"]) == (1, 0)


async def test_vms_that_strayed_are_counted_until_they_are_back() -> None:
    stage = await cluster_of(TWO, 1)
    vm = next(iter(stage.vms.values()))
    async with rows_of(stage) as (rows, _):
        await stage.report("worker-0", {vm.uid: TWO.packages[1].cpus})
        await refreshed(rows)
        assert (row(rows, "worker-0")["notPinned"], rows.totals()["notPinned"]) == (1, 1)
        await stage.report("worker-0")
        await refreshed(rows)
        assert (row(rows, "worker-0")["notPinned"], rows.totals()["notPinned"]) == (0, 0)


async def test_a_reader_gets_exactly_the_changes_since_the_last_request_however_long_ago() -> None:
    stage = await cluster_of(TWO, 4)
    async with rows_of(stage) as (rows, _):
        first = rows.revision
        await stage.report("worker-1")
        await refreshed(rows)
        second = rows.revision
        await stage.report("worker-3")
        await refreshed(rows)
        assert changed(rows, first) == ["worker-1", "worker-3"]
        assert changed(rows, second) == ["worker-3"]
        assert changed(rows, rows.revision) == []
        assert rows.since(rows.revision + 1) is None


async def test_the_end_of_a_node_is_reported_and_its_return_too() -> None:
    stage = StagedCluster()
    stage.add_node("worker", TWO)
    async with rows_of(stage) as (rows, _):
        before = rows.revision
        stage.cluster.delete_node("worker")
        await refreshed(rows)
        changes = rows.since(before)
        assert changes is not None
        assert changes.gone == (NodeName("worker"),)
        stage.add_node("worker", TWO)
        await refreshed(rows)
        changes = rows.since(before)
        assert changes is not None
        assert (changes.gone, len(changes.rows)) == ((), 1)


async def test_pods_that_wait_for_a_node_are_counted() -> None:
    stage = StagedCluster()
    async with rows_of(stage) as (rows, _):
        stage.cluster.create_pod("hopeful", request='{"version":1,"vcpus":2}')
        await refreshed(rows)
        assert (rows.totals()["waiting"], rows.totals()["firstWaiting"]) == (1, [("default", "hopeful")])
        stage.cluster.delete_pod("default", "hopeful", force=True)
        await refreshed(rows)
        assert rows.totals()["waiting"] == 0


async def test_readers_hear_that_something_new_is_known_about_a_vm_that_waits() -> None:
    stage = await cluster_of(TWO, 1)
    late = stage.cluster.create_pod("late", namespace="shop", uid="u-late", request="{}")
    async with rows_of(stage) as (rows, _):
        before = rows.revision
        await stage.cluster.set_pod_condition(
            late, Condition("PodScheduled", status=False, reason="Unschedulable", message="no room")
        )
        await refreshed(rows)
        assert rows.revision > before
        assert changed(rows, before) == []


async def next_of(feed: Feed, position: str) -> bytes:
    messages = feed.follow(position)
    async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(messages):
        return await anext(messages)


async def test_a_reader_of_another_replica_or_of_a_forgotten_time_loads_everything_anew() -> None:
    async with rows_of(await cluster_of(TWO, 1)) as (rows, _):
        feed = Feed(rows, (), streams=1)
        for position in ("", "another-1", feed.position + "9", "-", f"{feed.position}x", "9" * 400):
            assert await next_of(feed, position) == RELOAD


async def test_a_reader_without_news_is_informed_that_we_are_still_here() -> None:
    async with rows_of(await cluster_of(TWO, 1)) as (rows, _):
        feed = Feed(rows, (), streams=1, heartbeat_s=0.01)
        assert await next_of(feed, feed.position) == b'event: heartbeat\ndata: {"outage":""}\n\n'


async def test_a_reader_is_informed_of_a_watch_that_has_failed_for_long() -> None:
    now = 0.0
    store = Store(NODES, clock=lambda: now)
    async with rows_of(await cluster_of(TWO, 1)) as (rows, _):
        feed = Feed(rows, (store,), streams=1, heartbeat_s=0.01)
        store.apply(Interrupted(Unavailable("no answer")))
        now = 29.0
        assert feed.outage() == ""
        now = 30.0
        assert b'"outage":"watching nodes has failed for 30 s: no answer"' in await next_of(
            feed, feed.position
        )
        store.apply(Alive())
        assert feed.outage() == ""


async def test_changes_gather_and_reach_every_reader_once() -> None:
    stage = await cluster_of(TWO, 3)
    async with rows_of(stage) as (rows, _):
        feed = Feed(rows, (), streams=2, gather_s=0.01)
        running = asyncio.create_task(feed.run())
        with feed.stream(), feed.stream():
            here = feed.position
            reading = [asyncio.create_task(next_of(feed, here)) for _ in range(2)]
            for name in ("worker-0", "worker-2", "worker-0"):
                await stage.report(name)
            one, other = await asyncio.gather(*reading)
            assert one == other
            assert one.startswith(b"id: ")
            with pytest.raises(Unavailable, match="2 pages follow"), feed.stream():
                pass
        running.cancel()


async def test_nothing_is_computed_while_no_page_is_open() -> None:
    stage = await cluster_of(TWO, 1)
    async with rows_of(stage) as (rows, _):
        feed = Feed(rows, (), streams=1, gather_s=0)
        here = feed.position
        async with in_background(feed.run()):
            with feed.stream():
                await asyncio.sleep(0)
            await stage.report("worker-0")
            async with asyncio.timeout(PATIENCE_S):
                await rows.stale.wait()
            for _turn in range(10):
                await asyncio.sleep(0)
            assert (rows.stale.is_set(), feed.position) == (True, here)
            with feed.stream():
                assert b"event: changes" in await next_of(feed, here)


async def test_a_reader_that_disconnects_during_a_refresh_leaves_the_rest_of_it_to_the_other_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = await cluster_of(TWO, 1)
    async with rows_of(stage) as (rows, _):
        await stage.report("worker-0")
        async with asyncio.timeout(PATIENCE_S):
            await rows.stale.wait()
        with monkeypatch.context() as patched:
            patched.setattr(Turns, "spend", lambda *_: asyncio.Event().wait())
            reader = asyncio.create_task(rows.refresh())
            await asyncio.sleep(0)
            assert not rows.stale.is_set()
            reader.cancel()
            await asyncio.wait([reader])
        assert rows.stale.is_set()


async def test_a_page_more_than_allowed_is_refused_until_another_one_is_closed() -> None:
    async with rows_of(await cluster_of(TWO, 1)) as (rows, _):
        feed = Feed(rows, (), streams=2)
        with feed.stream():
            with feed.stream(), pytest.raises(Unavailable, match="2 pages follow"), feed.stream():
                pass
            with feed.stream():
                pass


async def test_rows_that_only_one_reader_asks_for_are_not_kept() -> None:
    async with rows_of(await cluster_of(TWO, 1)) as (rows, _):
        rows.revision = 2000
        feed = Feed(rows, (), streams=1)
        replica, _, _ = feed.position.partition("-")
        await next_of(feed, f"{replica}-0")
        tracemalloc.start()
        for revision in range(rows.revision):
            assert b"event: changes" in await next_of(feed, f"{replica}-{revision}")
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 500_000


async def test_streams_end_when_the_process_stops() -> None:
    async with rows_of(await cluster_of(TWO, 1)) as (rows, _):
        feed = Feed(rows, (), streams=1)
        messages = feed.follow(feed.position)
        waiting = asyncio.create_task(anext(messages, None))
        await asyncio.sleep(0)
        feed.end()
        async with asyncio.timeout(PATIENCE_S):
            assert await waiting is None


async def test_an_agent_that_is_gone_is_reported_until_it_is_back() -> None:
    stage = await cluster_of(TWO, 2)
    await stage.lose_agent("worker-0")
    async with rows_of(stage) as (rows, _):
        assert row(rows, "worker-0")["agent"] == GONE
        assert "agent" not in row(rows, "worker-1")  # no client has ever seen one there
        before = rows.revision
        stage.cluster.put_agent_pod("worker-0", is_ready=False)
        await refreshed(rows)
        assert row(rows, "worker-0")["agent"] == GONE
        stage.cluster.put_agent_pod("worker-0")
        await refreshed(rows)
        assert "agent" not in row(rows, "worker-0")
        assert changed(rows, before) == ["worker-0"]
        stage.cluster.delete_agent_pod("worker-0")
        await refreshed(rows)
        assert row(rows, "worker-0")["agent"] == GONE
