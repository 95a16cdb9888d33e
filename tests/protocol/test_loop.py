"""The simulation's loop ends a story that would never end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from random import Random

import pytest

from tests.protocol.loop import Livelock, SeededLoop, Standstill


def run(work: Coroutine[object, object, None]) -> None:
    loop = SeededLoop(Random(0), disorder=0.5, after_step=lambda: None)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(work)


@pytest.mark.parametrize("pause_s", [0.0, -1.0])
def test_work_that_goes_round_while_no_time_passes_is_a_livelock(pause_s: float) -> None:
    async def for_ever() -> None:
        for _ in itertools.count():
            await asyncio.sleep(pause_s)

    with pytest.raises(Livelock, match="100,000 steps"):
        run(for_ever())


def test_work_that_waits_for_nothing_under_way_is_a_standstill() -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Standstill):
        run(for_ever())


def test_much_work_over_time_is_neither() -> None:
    async def often() -> None:
        for _ in range(1000):
            for _ in range(200):
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)

    run(often())
