"""A plan is arranged in another way only while its pods are as they were when the search for it began."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvplace.core.cluster.rearranging import Arrangement, better_arrangements
from kvplace.kube.records import PodRecord
from kvplace.scheduler import joint_plan
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT


class Search:
    """A search for a better arrangement that goes on when it is told to."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.goes_on = asyncio.Event()

    def __call__(self, *args: Any, **named: Any) -> Iterator[Arrangement | None]:
        self.has_begun.set()
        while not self.goes_on.is_set():
            yield None
        yield from better_arrangements(*args, **named)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    made = Search()
    monkeypatch.setattr(joint_plan, "better_arrangements", made)
    return made


@pytest.fixture
def cluster() -> FaultyCluster:
    """One node of eight CPUs."""
    made = FaultyCluster()
    made.create_node("n1", topology=EIGHT)
    return made


@pytest.fixture
async def one(cluster: FaultyCluster) -> AsyncIterator[Replica]:
    async with replica(cluster, controller=False) as made:
        yield made


async def waiting(one: Replica, **asked: Any) -> list[PodRecord]:
    """Four pods, of which the first two fit on the node in turn, but all except for the second together."""
    sizes = (2, 5, 3, 3)
    pods = [asking_pod(one.cluster, f"vm-{n}", size, shape=b"alike", **asked) for n, size in enumerate(sizes)]
    await one.until(lambda: len(one.cache.pods.records) == len(pods))
    return pods


def holding(one: Replica, pods: list[PodRecord]) -> list[str]:
    return [pod.name for pod in pods if one.extender.holds.has(pod.uid)]


async def test_more_pods_get_a_place_while_nothing_changes(one: Replica, search: Search) -> None:
    pods = await waiting(one)
    asked = asyncio.create_task(one.filter(pods[0]))
    await search.has_begun.wait()
    assert holding(one, pods) == ["vm-0", "vm-1"]
    search.goes_on.set()
    assert (await asked).names == ["n1"]
    assert holding(one, pods) == ["vm-0", "vm-2", "vm-3"]


async def test_pods_with_an_explanation_learn_that_they_were_arranged_together(
    one: Replica, search: Search
) -> None:
    pods = await waiting(one, explain=True)
    search.goes_on.set()
    for pod in (pods[0], pods[2], pods[3]):
        assert (await one.filter(pod)).names == ["n1"]
        assert await one.bind(pod, "n1") == ""
        found = one.cluster.pod_annotations("default", pod.name)["kvplace.io/explanation"]
        assert found.endswith("arranged together with other waiting pods, so that more of them fit")


async def test_a_pod_that_kube_scheduler_has_asked_about_meanwhile_keeps_its_place(
    one: Replica, search: Search
) -> None:
    pods = await waiting(one)
    asked = asyncio.create_task(one.filter(pods[0]))
    await search.has_begun.wait()
    assert (await one.filter(pods[1])).names == ["n1"]
    search.goes_on.set()
    assert (await asked).names == ["n1"]
    assert holding(one, pods) == ["vm-0", "vm-1"]


async def test_nothing_is_held_for_a_pod_that_was_deleted_meanwhile(one: Replica, search: Search) -> None:
    pods = await waiting(one)
    asked = asyncio.create_task(one.filter(pods[0]))
    await search.has_begun.wait()
    gone = asyncio.Event()
    one.cache.pods.subscribe(lambda _, after: gone.set() if after is None else None)
    one.cluster.delete_pod("default", "vm-3", force=True)
    await gone.wait()
    search.goes_on.set()
    assert (await asked).names == ["n1"]
    assert holding(one, pods) == ["vm-0", "vm-1"]
