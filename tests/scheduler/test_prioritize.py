"""Prioritize scores from 0 to 10: ten for the best or the held node, zero where the pod does not fit."""

from __future__ import annotations

import pytest

from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.request import Scope
from kvplace.core.scalars import NodeName
from kvplace.scheduler.extender import ExtenderSettings, Mode
from tests.controller.replicas import asking_pod, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT, TWO

ADVISING = ExtenderSettings(mode=Mode.ADVISE)


@pytest.fixture
def cluster() -> FaultyCluster:
    made = FaultyCluster()
    for name in ("a", "b", "c"):
        made.create_node(name, topology=EIGHT)
    made.create_node("two", topology=TWO)
    return made


async def test_the_node_that_holds_the_pods_cores_gets_ten(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", 8)
        (node,) = (await one.filter(pod)).names or [NodeName("")]
        assert (await one.scores(pod))[node] == 10


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [(Strategy.PACK, {"a": 0, "b": 10, "c": 0}), (Strategy.SPREAD, {"a": 10, "b": 0, "c": 10})],
)
async def test_for_equally_good_placements_scores_follow_the_strategy(
    cluster: FaultyCluster, strategy: Strategy, expected: dict[str, int]
) -> None:
    async with replica(cluster, extending=ExtenderSettings(mode=Mode.ADVISE, strategy=strategy)) as one:
        assert await one.bind(asking_pod(cluster, "first", 2), "b") == ""
        assert await one.scores(asking_pod(cluster, "wide", 6), "a", "b", "c") == expected


async def test_where_the_vm_does_not_fit_the_score_is_zero(cluster: FaultyCluster) -> None:
    async with replica(cluster, extending=ADVISING) as one:
        assert await one.scores(asking_pod(cluster, "vm", 12, scope=Scope.ANY)) == {
            "a": 0,
            "b": 0,
            "c": 0,
            "two": 10,
        }
        assert await one.scores(asking_pod(cluster, "huge", 99)) == dict.fromkeys(("a", "b", "c", "two"), 0)
        assert await one.scores(asking_pod(cluster, "vm2"), "ghost") == {"ghost": 0}


async def test_a_pod_without_a_request_scores_zero_everywhere(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        assert await one.scores(cluster.create_pod("plain"), "a", "b") == {"a": 0, "b": 0}
