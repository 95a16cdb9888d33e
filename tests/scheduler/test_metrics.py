"""Preemptions, room that is made and nominations are counted once each, by how they ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping

from prometheus_client import Counter
from prometheus_client.samples import Sample

from kvplace.core.errors import Unavailable
from kvplace.core.request import OnFailure
from kvplace.scheduler.extender import ExtenderSettings
from kvplace.scheduler.extender_protocol import PreemptionArgs
from kvplace.scheduler.metrics import NOMINATIONS, PLACEMENTS, PREEMPTIONS, ROOM_MOVES, ROOMS
from kvplace.scheduler.room_maker import MakeRoom
from tests.controller.relocations import NodeAgent
from tests.controller.replicas import asking_pod, replica
from tests.kube.faults import Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.scheduler.crowded_node import halved, moved, moved_and_bound, victims

AUTOMATIC = ExtenderSettings(make_room=MakeRoom.AUTOMATIC)


def counts(counter: Counter) -> Mapping[str, float]:
    """The count of each label; a counter without labels has the empty one."""
    (family,) = counter.collect()
    return {_label(one): one.value for one in family.samples if one.name.endswith("_total")}


def _label(sample: Sample) -> str:
    return next(iter(sample.labels.values()), "")


@contextlib.contextmanager
def counted(counter: Counter, *labels: str) -> Iterator[None]:
    """Expect that the block adds one for each of these labels, and nothing else."""
    before = counts(counter)
    yield
    after = counts(counter)
    grown = {label: count - before.get(label, 0) for label, count in after.items()}
    assert {label: count for label, count in grown.items() if count} == {
        label: labels.count(label) for label in labels
    }


async def test_a_preemption_is_counted_by_its_answer(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster) as one:
        left = await halved(one, agent, movable=False)
        big = asking_pod(cluster, "big", 8, priority=10)
        assert not (await one.filter(big)).names
        with counted(PREEMPTIONS, "none"):
            never = PreemptionArgs(big, big.resources, False, True, {})
            assert not await one.extender.preempt(never)
        with counted(PREEMPTIONS, "none"):
            assert not await victims(one, asking_pod(cluster, "not-more-important", 8), left[0].uid)
        with counted(PREEMPTIONS, "unchanged"):
            floating = asking_pod(cluster, "floating", 8, priority=10, on_failure=OnFailure.FLOAT)
            assert await victims(one, floating, left[0].uid)
        with counted(PREEMPTIONS, "victims"):
            assert await victims(one, big, left[0].uid)


async def test_a_preemption_that_waits_for_cores_that_are_released_anyway_is_counted_as_waiting(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        first, second = await halved(one, agent, movable=False)
        cluster.delete_pod("default", first.name)
        await one.until(lambda: one.cache.pods.records[first.uid].deleting)
        with counted(PREEMPTIONS, "waiting"):
            assert await victims(one, asking_pod(cluster, "big", 8, priority=10), second.uid) == []


async def test_room_that_is_made_and_its_moves_are_counted(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        left = await halved(one, agent, movable=True)
        big = asking_pod(cluster, "big", 8, priority=10)
        with counted(ROOMS, "made"), counted(ROOM_MOVES, ""), counted(PREEMPTIONS, "making-room"):
            assert not (await one.filter(big)).names
            assert await victims(one, big, left[0].uid) == []
            await one.until(lambda: moved(agent))
            await moved_and_bound(one, agent, big)
            await one.until(lambda: not one.extender.room._making)


async def test_a_search_for_room_that_finds_no_moves_is_counted_as_none(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, movable=False)
        with counted(ROOMS, "none"), counted(ROOM_MOVES):
            assert not (await one.filter(asking_pod(cluster, "big", 8))).names
            await one.until(lambda: not one.extender.room._making)


async def test_room_whose_making_is_stopped_is_counted_as_stopped(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        await halved(one, agent, movable=True)
        with counted(ROOMS, "stopped"), counted(ROOM_MOVES, ""):
            assert not (await one.filter(asking_pod(cluster, "big", 8))).names
            await one.until(lambda: moved(agent))
            agent.fail(moved(agent)[0])
            await one.until(lambda: not one.extender.room._making)


async def test_a_nomination_is_counted_by_its_outcome(cluster: FaultyCluster) -> None:
    pods = [asking_pod(cluster, f"vm-{number}", shape=b"of one kind") for number in range(3)]
    cluster.faults.fail(Operation.NOMINATE_NODE, Unavailable("connection refused"))
    async with replica(cluster, extending=ExtenderSettings(nominate_from_nodes=1)) as one:
        await one.until(lambda: len(one.cache.pods.records) == 3)
        with counted(NOMINATIONS, "failed", "written"):
            await one.filter(pods[0])


def placements() -> tuple[float, float]:
    """The number of counted placements, and the seconds of all of them."""
    (family,) = PLACEMENTS.collect()
    values = {one.name.removeprefix(family.name): one.value for one in family.samples if not one.labels}
    return values["_count"], values["_sum"]


async def test_a_placement_is_counted_once_and_from_the_first_question(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", 2)
        number, seconds = placements()
        await one.filter(pod)
        await asyncio.sleep(2.0)
        node = min((await one.filter(pod)).names or [])
        assert not await one.bind(pod, node)
        assert not await one.bind(pod, node)
    counted_number, counted_seconds = placements()
    assert counted_number - number == 1
    assert 2.0 <= round(counted_seconds - seconds, 3) < 3.0
