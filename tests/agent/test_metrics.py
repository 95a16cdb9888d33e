"""A condition of a NodeTopology that is not True is a series of the agent as long as it lasts."""

from __future__ import annotations

from prometheus_client import REGISTRY

from kvplace.kube.object_records import Condition
from tests.agent.hosts import NODE, Host
from tests.agent.publishing_agent import publishing
from tests.kube.faulty_cluster import FaultyCluster


def is_exposed() -> bool:
    labels = {"condition": "CpusetsEnforced", "reason": "RuntimeUnavailable"}
    return REGISTRY.get_sample_value("kvplace_agent_failed_condition", labels) == 1


async def test_a_failed_condition_is_exposed_until_it_is_true_again(host: Host) -> None:
    cluster = FaultyCluster()
    cluster.create_node(NODE)
    async with publishing(host, cluster) as agent:
        agent.report.put_condition(Condition("CpusetsEnforced", False, "RuntimeUnavailable", "no socket"))
        await agent.until(lambda: is_exposed() and not agent.condition("CpusetsEnforced").status)
        agent.report.put_condition(Condition("CpusetsEnforced", True, "Connected", "connected"))
        await agent.until(lambda: not is_exposed())
    assert not is_exposed()
