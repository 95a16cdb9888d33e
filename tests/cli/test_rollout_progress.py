"""What is said while a rollout runs and nothing happens."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.cli.rollout_progress import shown_run
from kvplace.rollout.report import Report
from kvplace.rollout.run import RolloutRun
from tests.rollout.examples import everywhere, moving, rollout
from tests.rollout.memory_rollouts import MemoryRollouts
from tests.virtual_time import JumpingLoop


def bind(cluster: MemoryRollouts, name: str) -> None:
    cluster.bind(name)


def test_when_nothing_changes_it_is_said_once_what_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run() -> Report:
        cluster = MemoryRollouts()
        clock = asyncio.get_running_loop().time
        async with moving(cluster, bind, pause_s=1.0):
            return await shown_run(RolloutRun(cluster, rollout(timeout="40s"), everywhere, clock=clock))

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        report = runner.run(run())
    assert report.timed_out
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "nothing has changed" in line]
    assert told.startswith(
        "kvplace: nothing has changed for 30 s: 6 VMs bound and not further; Ctrl-C leaves"
    )
