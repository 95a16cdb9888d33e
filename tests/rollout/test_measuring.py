"""Whether a user measures the VMs of a rollout: agents that are not there, or go while it runs."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from kvplace.core.errors import ExitCode, Forbidden
from kvplace.core.scalars import NodeName
from kvplace.core.vm_stages import VmStage
from kvplace.rollout.report import Report
from kvplace.rollout.rollouts import Rollouts
from kvplace.rollout.run import AgentReader, AgentReport
from tests.rollout.examples import everywhere, gone, moving, nowhere, one_server, rollout, rollouts_of
from tests.rollout.memory_rollouts import NAMESPACE, MemoryRollouts
from tests.virtual_time import JumpingLoop

NAMES = [f"web-{number:02}" for number in range(1, 7)]


def start(cluster: MemoryRollouts, name: str) -> None:
    """Let a VM run on a node of its own; no agent measures it."""
    cluster.bind(name, f"node-of-{name}")
    cluster.run(name)


def test_where_no_agent_describes_the_node_running_is_the_end_and_no_vm_is_called_pinned() -> None:
    async def run() -> tuple[Report, Report]:
        cluster = MemoryRollouts()
        rollouts = rollouts_of(cluster, nowhere)
        async with moving(cluster, start, pause_s=0.1):
            report = await rollouts.create(await rollouts.prepare(rollout()))
        assert asyncio.get_running_loop().time() < 60
        return report, await rollouts.status("web")

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        report, status = runner.run(run())
    assert report.exit_code is ExitCode.DONE
    assert dict(report.counts.reached) == {
        VmStage.CREATED: 6, VmStage.BOUND: 6, VmStage.RUNNING: 6, VmStage.PINNED: 0
    }  # fmt: skip
    assert report.document()["notMeasured"] == NAMES
    (note,) = report.notes
    assert note.startswith("6 VMs on 6 nodes where no agent measures (node-of-web-01, node-of-web-02, ")
    assert status.notes == report.notes


async def test_by_the_clock_of_the_cluster_a_vm_has_not_run_for_long_whatever_ours_states() -> None:
    cluster = MemoryRollouts()
    rollouts = Rollouts(
        cluster, NAMESPACE, one_server, gone, now=lambda: datetime.fromtimestamp(cluster.now + 5.0, UTC)
    )
    async with moving(cluster, start):
        await rollouts.create(await rollouts.prepare(rollout(until="running")))
    cluster.documents["web"] = cluster.documents["web"].replace('"until":"running"', '"until":"pinned"')
    assert (await rollouts.status("web")).exit_code is ExitCode.PARTLY_DONE


def test_an_agent_that_was_removed_and_is_quiet_about_new_vms_is_not_waited_for() -> None:
    async def run() -> Report:
        rollouts = rollouts_of(cluster := MemoryRollouts(), gone)
        async with moving(cluster, start, pause_s=0.1):
            report = await rollouts.create(await rollouts.prepare(rollout()))
        assert 30 < asyncio.get_running_loop().time() < 60
        return report

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        report = runner.run(run())
    assert report.exit_code is ExitCode.DONE
    assert (report.counts.reached[VmStage.RUNNING], report.counts.reached[VmStage.PINNED]) == (6, 0)
    assert report.notes[0].startswith("6 VMs on 6 nodes where no agent measures (")


def test_an_agent_that_goes_while_a_rollout_runs_is_not_waited_for() -> None:
    asked: Counter[NodeName] = Counter()

    async def goes(node: NodeName) -> AgentReport | None:
        asked[node] += 1
        return await (everywhere(node) if asked[node] <= 4 else gone(node))

    async def run() -> Report:
        rollouts = rollouts_of(cluster := MemoryRollouts(), goes)
        async with moving(cluster, start, pause_s=0.1):
            return await rollouts.create(await rollouts.prepare(rollout()))

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        report = runner.run(run())
    assert report.exit_code is ExitCode.DONE
    assert report.counts.reached[VmStage.PINNED] == 0


def test_a_vm_that_runs_and_is_not_measured_waits_for_the_agent_of_its_node() -> None:
    async def run() -> str:
        cluster = MemoryRollouts()
        prepared = await rollouts_of(cluster).prepare(rollout(timeout="5m"))
        running = await rollouts_of(cluster).begin(prepared)
        async with moving(cluster, start, pause_s=0.1):
            following = asyncio.create_task(running.run())
            await asyncio.sleep(100)
            waits_for = running.waits_for
            running.stop()
            await following
        return waits_for

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        waits_for = runner.run(run())
    assert waits_for.startswith("6 VMs still running (the agent of node node-of-web-0")
    assert waits_for.endswith(" has not reported yet whether it is pinned)")


async def test_a_vm_that_is_measured_although_no_agent_describes_its_node_is_waited_for() -> None:
    rollouts = rollouts_of(cluster := MemoryRollouts(), nowhere)
    async with moving(cluster):
        report = await rollouts.create(await rollouts.prepare(rollout()))
    assert (report.counts.reached[VmStage.PINNED], report.notes) == (6, ())
    assert "notMeasured" not in report.document()


async def test_without_the_right_to_see_who_measures_a_vm_is_waited_for() -> None:
    async def forbidden(node: NodeName) -> AgentReport | None:
        raise Forbidden("you may not list nodetopologies")

    rollouts = rollouts_of(cluster := MemoryRollouts(), forbidden)
    async with moving(cluster, start):
        report = await rollouts.create(await rollouts.prepare(rollout(timeout="1s")))
    assert report.exit_code is ExitCode.TIMED_OUT
    assert report.notes == ()


def one_is_measured(cluster: MemoryRollouts, name: str) -> None:
    """Let all VMs run on one node, whose agent measures the first one only."""
    cluster.bind(name, "worker")
    cluster.run(name)
    if name == NAMES[0]:
        cluster.pin(name)


def one_is_not_in_its_place(cluster: MemoryRollouts, name: str) -> None:
    """Let all VMs run on one node; its agent reports the first one as not pinned, and pins the others."""
    cluster.bind(name, "worker")
    cluster.run(name)
    if name == NAMES[0]:
        cluster.strays(name, "vCPU 0 left its CPU")
    else:
        cluster.pin(name)


def reported(pods: frozenset[str] | None, *, has_pod: bool | None) -> AgentReader:
    """Let the agent report nothing new, after it has spoken about these pods; None: about all."""

    async def read(node: NodeName) -> AgentReport | None:
        found = await everywhere(node)
        assert found is not None
        return AgentReport(found.pods if pods is None else pods, "7", has_pod)

    return read


def after_100_s(agent: AgentReader, step: Callable[[MemoryRollouts, str], None]) -> Report:
    """Carry out a rollout, and stop waiting after a while; the exit code reports it then."""

    async def run() -> Report:
        rollouts = rollouts_of(cluster := MemoryRollouts(), agent)
        running = await rollouts.begin(await rollouts.prepare(rollout()))
        async with moving(cluster, step, pause_s=0.1):
            asyncio.get_running_loop().call_later(100, running.stop)
            return await running.run()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(run())


def test_an_agent_that_goes_after_it_has_measured_one_vm_is_not_waited_for() -> None:
    report = after_100_s(reported(frozenset({"uid-3"}), has_pod=None), one_is_measured)
    assert report.exit_code is ExitCode.DONE
    assert report.counts.reached[VmStage.PINNED] == 1
    assert report.document()["notMeasured"] == NAMES[1:]
    assert report.notes[0].startswith("5 VMs on 1 node where no agent measures (worker): ")


@pytest.mark.parametrize(
    ("has_pod", "exit_code"),
    [(False, ExitCode.DONE), (True, ExitCode.INTERRUPTED), (None, ExitCode.INTERRUPTED)],
)
def test_an_old_word_about_a_vm_counts_until_the_agent_has_no_pod_any_more(
    has_pod: bool | None, exit_code: ExitCode
) -> None:
    report = after_100_s(reported(None, has_pod=has_pod), one_is_not_in_its_place)
    assert report.exit_code is exit_code
    assert report.document().get("notMeasured") == (NAMES[:1] if exit_code is ExitCode.DONE else None)


def test_an_agent_that_writes_is_there_although_its_pod_is_not_ready() -> None:
    writes = itertools.count()

    async def alive(node: NodeName) -> AgentReport | None:
        found = await everywhere(node)
        assert found is not None
        return AgentReport(found.pods, str(next(writes)), has_pod=False)

    assert after_100_s(alive, one_is_not_in_its_place).exit_code is ExitCode.INTERRUPTED


def test_an_agent_that_comes_back_is_waited_for_again() -> None:
    def step(cluster: MemoryRollouts, name: str) -> None:
        one_is_measured(cluster, name)
        if name == NAMES[0]:
            loop = asyncio.get_running_loop()
            loop.call_later(20, cluster.pin, NAMES[1])

    report = after_100_s(reported(frozenset({"uid-3"}), has_pod=None), step)
    assert report.document()["notMeasured"] == NAMES[2:]
