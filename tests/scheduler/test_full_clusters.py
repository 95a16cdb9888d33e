"""Where a rollout does not fit whole, planning its pods together costs none of them its cores."""

from __future__ import annotations

from random import Random

import pytest

from kvplace.core.request import Scope
from kvplace.kube.object_records import NO_SHAPE, PodRecord
from tests.controller.replicas import asking_pod, replica
from tests.nodes.machines import EIGHT, TWO
from tests.scheduler.counting import Counting


async def placed(sizes: list[int], *, together: bool, first_priority: int = 0) -> list[str]:
    """Ask about pods of these sizes one after the other and bind the ones that fit; returns their names."""
    cluster = Counting()
    for number in range(4):
        cluster.create_node(f"node-{number}", topology=(EIGHT, TWO)[number % 2])
    pods: list[PodRecord] = []
    for number, vcpus in enumerate(sizes):
        pods.append(
            asking_pod(
                cluster,
                f"vm-{number}",
                vcpus,
                scope=Scope.ONE_NUMA,
                shape=b"rollout" if together else NO_SHAPE,
                priority=first_priority if number == 0 else 0,
            )
        )
    bound: list[str] = []
    async with replica(cluster, controller=False) as one:
        await one.until(lambda: len(one.cache.pods.records) == len(pods))
        for pod in pods:
            for node in (await one.filter(pod)).names or ():
                assert await one.bind(pod, node) == ""
                bound.append(pod.name)
    return bound


def sizes_of(seed: int) -> list[int]:
    random = Random(seed)
    return [random.choice((2, 3, 4, 5, 6)) for _ in range(16)]


async def test_as_many_pods_find_cores_together_as_one_by_one() -> None:
    alone = [len(await placed(sizes_of(seed), together=False)) for seed in range(12)]
    together = [len(await placed(sizes_of(seed), together=True)) for seed in range(12)]
    assert together == alone


@pytest.mark.parametrize("seed", range(6))
async def test_the_pod_that_is_asked_about_first_is_never_given_up_for_others(seed: int) -> None:
    assert "vm-0" in await placed([8, *sizes_of(seed)], together=True)


async def test_a_pod_of_higher_priority_is_never_given_up_for_several_of_lower() -> None:
    sizes = [8, *[4] * 20]
    assert "vm-0" in await placed(sizes, together=True, first_priority=1)
