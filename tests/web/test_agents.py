"""The reports about the agent of a node: that it is gone, that it is not well, that it is behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplace.core.scalars import NodeName
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.object_records import Condition, TopologyRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import AGENT_PODS, AGENTS
from kvplace.service.process import in_background
from kvplace.web.documents import GONE, Agents
from tests.nodes.machines import TWO

NODE = NodeName("worker")
WELL = TopologyRecord(NODE, TWO, by_agent=True, generation=3, observed_generation=3)
NOT_READY = Condition("Ready", False, "NoCpusets", "no cgroup hierarchy is mounted")


async def trouble(described: TopologyRecord | None, *, pods: list[str]) -> str:
    cluster, store = MemoryCluster(), Store(AGENT_PODS, AGENTS)
    agents = Agents(store)
    for node in pods:
        cluster.put_agent_pod(node)
    async with in_background(store.run(cluster)):
        await agents.announce([])
        return agents.trouble(NODE, described)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (None, ""),
        (WELL, ""),
        (
            replace(WELL, conditions=(NOT_READY,)),
            "its agent reports NoCpusets: no cgroup hierarchy is mounted",
        ),
        (replace(WELL, generation=4), "its agent has not seen the newest description yet"),
        (replace(WELL, by_agent=False, observed_generation=None), ""),
    ],
)
async def test_an_agent_that_runs_is_believed(described: TopologyRecord | None, said: str) -> None:
    assert await trouble(described, pods=["worker"]) == said


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (None, ""),
        (WELL, GONE),
        (replace(WELL, by_agent=False), GONE),
        (replace(WELL, by_agent=False, observed_generation=None), ""),
    ],
    ids=["nothing is described", "by the agent", "by hand, beside an agent", "by hand"],
)
async def test_an_agent_without_a_pod_on_its_node_is_gone(
    described: TopologyRecord | None, said: str
) -> None:
    assert await trouble(described, pods=["another"]) == said


def test_no_client_is_called_gone_before_the_pods_are_known() -> None:
    assert Agents(Store(AGENT_PODS, AGENTS)).trouble(NODE, WELL) == ""
