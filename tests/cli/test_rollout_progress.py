"""The reports of a rollout that runs while nothing happens."""

from __future__ import annotations

import asyncio
import sys

import pytest

from kvplace.cli.rollout_dialog import shown_run, told_what_is_left
from kvplace.rollout.report import Report
from kvplace.rollout.run import RolloutRun
from tests.cli.terminal import Terminal
from tests.rollout.examples import everywhere, moving, rollout
from tests.rollout.memory_rollouts import MemoryRollouts
from tests.virtual_time import JumpingLoop

ASKING = """
import asyncio
import click
from kvplace.cli.live_cluster import run_until_interrupt
from kvplace.cli.live_cluster import ask

async def main():
    try:
        ask("Make 3 VMs?")
    finally:
        for _ in range(5):
            await asyncio.sleep(0.01)
        print("closed")

try:
    run_until_interrupt(main())
except click.Abort:
    print("nothing was made")
"""


def bind(cluster: MemoryRollouts, name: str) -> None:
    cluster.bind(name)


def test_when_nothing_changes_the_reason_of_the_wait_is_reported_once(
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
    assert told.startswith("kvplace: nothing has changed for 30 s: 6 VMs still bound; Ctrl-C leaves")


def test_a_deletion_reports_the_remaining_vms_at_most_once_a_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    moments = {9: 0.5, 8: 1.0, 7: 1.5, 1: 2.5, 0: 9.0}
    now = [0.0]
    tell = told_what_is_left(lambda: now[0])
    for left, now[0] in moments.items():
        tell(left, 9)
    assert capsys.readouterr().err.splitlines() == [
        "kvplace: 8 of 9 VMs left",
        "kvplace: 1 of 9 VMs left",
        "kvplace: the VMs are gone; waiting for their pods",
    ]


def test_ctrl_c_at_the_question_is_a_no_at_once_and_is_not_taken_twice() -> None:
    with Terminal([sys.executable, "-c", ASKING], {}) as terminal:
        terminal.wait_for_question("Make 3 VMs? [y/N]")
        terminal.interrupt()
        assert "closed" in terminal.read_until("nothing was made")
