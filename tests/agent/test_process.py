"""The agent as a process: what it starts with, when it is ready, how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest
from prometheus_client import REGISTRY

from harness.waiting import PATIENCE_S
from kvplace.agent.cgroup_source import CgroupSource
from kvplace.agent.conditions import TopologyCondition
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.agent.nri_source import NriSource
from kvplace.agent.process import RunningAgent, keeper_of, running_agent
from kvplace.core.errors import BadTopology, Corrupt
from kvplace.core.node_topology import Enforcement
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.service.process import in_background
from tests.agent.hosts import NODE, Host
from tests.kube.restored_cluster import RestoredCluster
from tests.nodes.machines import EIGHT


async def test_it_is_ready_when_the_objects_of_its_node_have_been_read(host: Host) -> None:
    cluster = MemoryCluster()
    cluster.create_pod("here", node=NODE)
    cluster.create_pod("elsewhere", node="other")
    async with running_agent(host.settings(), cluster) as agent:
        for store in agent.own.stores:
            await store.wait_until_synced()
        assert [pod.name for pod in agent.own.pods.records.values()] == ["here"]
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            while await readiness_of(agent, session) != "ok\n":
                pass


async def test_the_report_is_complete_when_every_pod_has_been_checked(host: Host) -> None:
    complete = asyncio.Event()
    async with running_agent(host.settings(), MemoryCluster()) as agent, asyncio.timeout(PATIENCE_S):
        assert not agent.report.is_complete
        agent.report.subscribe(lambda: complete.set() if agent.report.is_complete else None)
        await complete.wait()


async def readiness_of(agent: RunningAgent, session: aiohttp.ClientSession) -> str:
    async with session.get(f"http://{agent.health_address}/readyz") as answer:
        return await answer.text()


async def test_a_host_without_cpus_is_an_error_that_names_the_file(host: Host) -> None:
    host.online(set())
    with pytest.raises(BadTopology, match="sys/devices/system/cpu"):
        async with running_agent(host.settings(), MemoryCluster()):
            pass


async def test_it_ends_when_the_past_has_changed_since_it_remembers_what_it_wrote(host: Host) -> None:
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(PATIENCE_S), running_agent(host.settings(), RestoredCluster()):
            await asyncio.Event().wait()
    assert ended.group_contains(Corrupt, match="gone back")


async def test_a_second_agent_on_the_node_begins_when_the_first_has_ended(host: Host) -> None:
    begun = asyncio.Event()

    async def second() -> None:
        async with running_agent(host.settings(), MemoryCluster()):
            begun.set()

    async with running_agent(host.settings(), MemoryCluster()):
        waiting = asyncio.create_task(second())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        assert not begun.is_set()
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    assert begun.is_set()


async def test_without_nri_cgroups_are_written(host: Host) -> None:
    host.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu")
    assert isinstance(keeper_of(host.settings(), NodeObjects(NODE, EIGHT), NodeReport())[1], CgroupSource)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, NriSource),
        (Enforcement.NRI, NriSource),
        (Enforcement.CGROUP, CgroupSource),
        (Enforcement.NONE, CgroupSource),
        (Enforcement.DRA, NriSource),
    ],
)
async def test_with_nri_the_runtime_sets_them_unless_the_operator_asks_for_something_else(
    host: Host, asked: Enforcement | None, found: type
) -> None:
    host.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu")
    host.write("var/run/nri/nri.sock", "")
    settings = replace(host.settings(), enforcement=asked)
    assert isinstance(keeper_of(settings, NodeObjects(NODE, EIGHT), NodeReport())[1], found)


async def test_a_host_without_cpusets_is_reported_and_the_agent_goes_on(host: Host) -> None:
    report = NodeReport()
    keeper, source = keeper_of(host.settings(), NodeObjects(NODE, EIGHT), report)
    condition = report.conditions[TopologyCondition.CPUSETS_ENFORCED]
    assert (condition.status, condition.reason) == (False, "NoCpusets")
    assert condition.message.startswith("no cgroup hierarchy with the cpuset controller is mounted below")
    async with in_background(keeper.run(source)):
        await asyncio.sleep(0)
    assert (keeper.containers(), keeper.plan.containers, report.enforcement) == ([], {}, Enforcement.NONE)
    assert report.conditions[TopologyCondition.CPUSETS_ENFORCED] == condition


def test_whether_an_agent_enforces_is_a_metric_by_which_agents_are_counted() -> None:
    report = NodeReport()
    seen = []
    for how in (Enforcement.NRI, Enforcement.NONE, Enforcement.CGROUP, Enforcement.DRA):
        report.enforce(how)
        seen.append(REGISTRY.get_sample_value("kvplace_agent_enforces"))
    assert seen == [1, 0, 1, 1]
