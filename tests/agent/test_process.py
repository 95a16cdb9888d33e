"""The agent as a process: what it starts with, when it is ready, how it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import REGISTRY

from harness.waiting import PATIENCE_S
from kvplace.agent.cgroup_source import CgroupSource
from kvplace.agent.conditions import TopologyCondition
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.agent.nri_source import NriSource
from kvplace.agent.process import RunningAgent, keeper_of, only_instance, running_agent
from kvplace.core.errors import BadTopology, Corrupt, Misconfigured
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


async def test_it_ends_when_the_api_server_was_restored_since_it_remembers_its_own_writes(host: Host) -> None:
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


HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
os.pwrite(descriptor, b"%d" % os.getpid(), 0)
print("locked", flush=True)
sys.stdin.read()
"""


def _other_agent(lock: Path) -> subprocess.Popen[str]:
    lock.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(lock)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    return other


def _end(other: subprocess.Popen[str]) -> None:
    other.kill()
    other.communicate()


async def test_a_second_agent_waits_and_names_the_first_until_that_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "kvplace" / "agent.lock"
    other = _other_agent(lock)
    waits: asyncio.Queue[str] = asyncio.Queue()

    async def second() -> str:
        async with only_instance(lock, waits.put_nowait):
            return lock.read_text()

    task = asyncio.create_task(second())
    assert f"Another agent runs on this node (process {other.pid})" in await waits.get()
    done, _ = await asyncio.wait([task], timeout=0.1)
    assert not done
    _end(other)
    assert await task == str(os.getpid())


async def test_one_that_waits_can_be_ended_and_takes_no_lock_later(tmp_path: Path) -> None:
    lock = tmp_path / "agent.lock"
    other = _other_agent(lock)
    waits: asyncio.Queue[str] = asyncio.Queue()

    async def second() -> None:
        async with only_instance(lock, waits.put_nowait):
            raise AssertionError("the other one has it")

    task = asyncio.create_task(second())
    await waits.get()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    _end(other)
    async with asyncio.timeout(PATIENCE_S), only_instance(lock, waits.put_nowait):
        pass


async def test_the_only_agent_does_not_wait(tmp_path: Path) -> None:
    waits: list[str] = []
    for _ in range(2):
        async with only_instance(tmp_path / "run" / "agent.lock", waits.append):
            assert (tmp_path / "run" / "agent.lock").read_text() == str(os.getpid())
    assert waits == []


async def test_a_lock_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misconfigured, match=r"file/agent\.lock cannot be opened"):
        async with only_instance(tmp_path / "file" / "agent.lock", print):
            pass


async def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "agent.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Misconfigured):
        async with only_instance(tmp_path / "agent.lock", print):
            pass
    assert not (tmp_path / "elsewhere").exists()
