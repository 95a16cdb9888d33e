"""The agent as a process: what it starts with, when it is ready, how it ends."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from kvplace.agent.process import RunningAgent, running_agent
from kvplace.core.errors import BadTopology, Corrupt
from kvplace.kube.memory_cluster import MemoryCluster
from tests.agent.hosts import NODE, Host
from tests.kube.restored_cluster import RestoredCluster


async def test_it_is_ready_when_the_objects_of_its_node_have_been_read(host: Host) -> None:
    cluster = MemoryCluster()
    cluster.create_pod("here", node=NODE)
    cluster.create_pod("elsewhere", node="other")
    async with running_agent(host.settings(), cluster) as agent:
        for store in agent.own.stores:
            await store.wait_until_synced()
        assert [pod.name for pod in agent.own.pods.records.values()] == ["here"]
        async with asyncio.timeout(30), aiohttp.ClientSession() as session:
            while await readiness_of(agent, session) != "ok\n":
                pass


async def test_the_report_is_complete_when_every_pod_has_been_checked(host: Host) -> None:
    complete = asyncio.Event()
    async with running_agent(host.settings(), MemoryCluster()) as agent, asyncio.timeout(30):
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
        async with asyncio.timeout(30), running_agent(host.settings(), RestoredCluster()):
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
    async with asyncio.timeout(30):
        await waiting
    assert begun.is_set()
