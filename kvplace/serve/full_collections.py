"""Full garbage collections happen while kube-scheduler asks nothing.

Python begins one by itself when many new objects have lived for a while, so in the middle of a rollout. It
looks at all that has been made since `serve` was ready, and stops the event loop meanwhile: for tens of
milliseconds with 5,000 nodes that have all changed. Here only young objects are collected at such a time,
which takes some milliseconds. Few objects need more, mainly those of connections that have ended.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

QUIET_S = 2.0
"""When no call has come for so long, a full collection holds up nobody."""
LATEST_S = 3600.0
"""A full collection that is due is not put off for longer."""
_NEVER = 2**31 - 1
"""The largest threshold that Python takes."""


async def collect_while_quiet(calls: Callable[[], int]) -> None:
    """Begin full collections in place of Python until cancelled; `calls` counts what was asked so far."""
    loop = asyncio.get_running_loop()
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        not_due, seen = loop.time(), calls()
        while True:
            await asyncio.sleep(QUIET_S)
            before, seen = seen, calls()
            if gc.get_count()[2] < full:
                not_due = loop.time()
            elif seen == before or loop.time() - not_due >= LATEST_S:
                gc.collect()
                not_due = loop.time()
    finally:
        gc.set_threshold(young, middle, full)
