"""A loop that something holds up is seen in the metrics."""

from __future__ import annotations

import asyncio
import time

from harness.waiting import PATIENCE_S
from kvplace.service.process import LOOP_DELAYS, watch_loop


def seen() -> tuple[float, float]:
    """How often the loop was timed, and how many seconds it was late in all."""
    samples = {sample.name: sample.value for family in LOOP_DELAYS.collect() for sample in family.samples}
    name = "kvplace_process_loop_delay_seconds"
    return samples[f"{name}_count"], samples[f"{name}_sum"]


async def test_what_holds_the_loop_up_is_seen_as_its_delay() -> None:
    count, late_s = seen()
    watching = asyncio.create_task(watch_loop())
    await asyncio.sleep(0)  # it waits for its timer now
    time.sleep(0.5)  # noqa: ASYNC251 - it is the test that holds the loop up
    async with asyncio.timeout(PATIENCE_S):
        while seen()[0] == count:  # noqa: ASYNC110 - nothing announces what is counted
            await asyncio.sleep(0)
    watching.cancel()
    assert seen()[1] - late_s >= 0.2
