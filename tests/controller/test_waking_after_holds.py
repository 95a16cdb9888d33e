"""A pod refused because cores were held for another pod is tried again when that pod does not take them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kvplace.core.well_known_names import RELEASED_AT
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender import ExtenderSettings
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT

PLANNING = ExtenderSettings(nominate_from_nodes=1)


async def held_for_the_first(one: Replica) -> tuple[PodRecord, PodRecord]:
    """Two pods that request all of node n1: the first has its cores held, and the second is refused."""
    first, second = (asking_pod(one.cluster, name, vcpus=8) for name in ("first", "second"))
    await one.until(lambda: {first.uid, second.uid} <= one.cache.pods.records.keys())
    assert (await one.filter(first, "n1")).names == ["n1"]
    assert (await one.filter(second, "n1")).names == []
    return first, second


@contextlib.asynccontextmanager
async def refused_for_a_hold(cluster: FaultyCluster) -> AsyncIterator[tuple[Replica, PodRecord, PodRecord]]:
    """A replica that holds all cores of node n1 for one pod and has refused another one because of that."""
    async with replica(cluster) as one:
        first, second = await held_for_the_first(one)
        cluster.change_pod("default", "second", was_tried=True)
        await one.until(lambda: one.cache.pods.records[second.uid].was_tried)
        assert woken(cluster) is None
        yield one, first, second


def woken(cluster: FaultyCluster, node: str = "n1") -> str | None:
    """When waiting pods were woken on a node."""
    return cluster.node_annotations(node).get(RELEASED_AT)


async def test_a_pod_that_is_deleted_before_its_bind_wakes_who_was_refused(cluster: FaultyCluster) -> None:
    async with refused_for_a_hold(cluster) as (one, _first, second):
        cluster.delete_pod("default", "first", force=True)
        await one.until(lambda: woken(cluster))
        assert (await one.filter(second, "n1")).names == ["n1"]


async def test_a_hold_that_expires_wakes_who_was_refused_although_nothing_asks(
    cluster: FaultyCluster,
) -> None:
    async with refused_for_a_hold(cluster) as (one, _first, second):
        began = asyncio.get_running_loop().time()
        await one.until(lambda: woken(cluster))
        assert 29.0 < asyncio.get_running_loop().time() - began < 31.0
        assert (await one.filter(second, "n1")).names == ["n1"]


async def test_a_pod_that_another_replica_binds_elsewhere_wakes_who_was_refused(
    cluster: FaultyCluster,
) -> None:
    cluster.create_node("n2", topology=EIGHT)
    async with refused_for_a_hold(cluster) as (one, first, _second):
        async with replica(cluster, controller=False) as other:
            assert await other.bind(first, "n2") == ""
        await one.until(lambda: woken(cluster))


async def test_a_pod_that_goes_to_another_node_when_it_is_tried_again_wakes_who_was_refused(
    cluster: FaultyCluster,
) -> None:
    cluster.create_node("n2", topology=EIGHT)
    async with refused_for_a_hold(cluster) as (one, first, _second):
        assert (await one.filter(first, "n2")).names == ["n2"]
        await one.until(lambda: woken(cluster))


async def test_no_pod_is_woken_while_the_pod_keeps_its_cores_or_has_taken_them(
    cluster: FaultyCluster,
) -> None:
    async with refused_for_a_hold(cluster) as (one, first, _second):
        assert (await one.filter(first, "n1")).names == ["n1"]  # tried again
        assert await one.bind(first, "n1") == ""
        await asyncio.sleep(100.0)
        assert woken(cluster) is None


async def test_no_pod_is_woken_when_another_replica_binds_the_pod_there(cluster: FaultyCluster) -> None:
    async with refused_for_a_hold(cluster) as (one, first, _second):
        async with replica(cluster, controller=False) as other:
            assert await other.bind(first, "n1") == ""
        await one.until(lambda: not one.held())
        await asyncio.sleep(100.0)
        assert woken(cluster) is None


async def test_no_pod_is_woken_by_a_hold_that_ends_before_any_pod_was_refused(cluster: FaultyCluster) -> None:
    """A pod may wait for longer than its hold lasts, for example for its disk."""
    async with replica(cluster) as one:
        patient = asking_pod(cluster, "patient", vcpus=8)
        assert (await one.filter(patient, "n1")).names == ["n1"]
        await asyncio.sleep(100.0)
        assert (one.held(), woken(cluster)) == (0, None)


async def test_who_is_known_to_be_refused_only_after_the_hold_has_ended_is_woken_then(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        first, _second = await held_for_the_first(one)
        cluster.delete_pod("default", "first", force=True)
        await one.until(lambda: first.uid not in one.cache.pods.records)
        await asyncio.sleep(10.0)
        assert woken(cluster) is None
        cluster.change_pod("default", "second", was_tried=True)
        await one.until(lambda: woken(cluster))


async def test_plans_for_a_node_that_kube_scheduler_rejects_wake_who_was_refused(
    cluster: FaultyCluster,
) -> None:
    cluster.create_node("n2", topology=EIGHT)
    async with replica(cluster, extending=PLANNING) as one:
        alike = [asking_pod(cluster, f"alike-{number}", vcpus=8, shape=b"alike") for number in range(2)]
        other = asking_pod(cluster, "other", vcpus=4, priority=-1)
        await one.until(lambda: len(one.cache.pods.records) == 3)
        chosen = (await one.filter(alike[0])).names or []
        assert (len(chosen), one.held()) == (1, 2)
        assert (await one.filter(other)).names == []
        cluster.change_pod("default", "other", was_tried=True)
        await one.until(lambda: one.cache.pods.records[other.uid].was_tried)
        planned = one.extender.pending.node_of(alike[1].uid)
        assert planned is not None
        assert (await one.filter(alike[1], *chosen)).names == []
        await one.until(lambda: woken(cluster, planned))


@pytest.mark.parametrize(("takes", "is_left"), [(3, True), (6, False)])
async def test_a_refused_pod_is_tried_again_for_cores_of_a_plan_that_another_pod_leaves(
    cluster: FaultyCluster, takes: int, is_left: bool
) -> None:
    async with replica(cluster, extending=PLANNING) as one:
        asked, planned = (asking_pod(cluster, f"{n}-vcpus", vcpus=n, shape=b"alike") for n in (2, 6))
        refused = asking_pod(cluster, "refused", vcpus=3, priority=-1)
        await one.until(lambda: len(one.cache.pods.records) == 3)
        assert (await one.filter(asked)).names == ["n1"]
        assert one.extender.pending.planned_node(planned.uid) == "n1"
        assert (await one.filter(refused)).names == []
        cluster.change_pod("default", "refused", was_tried=True)
        await one.until(lambda: one.cache.pods.records[refused.uid].was_tried)
        assert (await one.filter(asking_pod(cluster, "taker", vcpus=takes))).names == ["n1"]
        assert one.extender.pending.hold_of(planned.uid) is None
        await asyncio.sleep(1.0)
        assert (woken(cluster) is not None) is is_left
