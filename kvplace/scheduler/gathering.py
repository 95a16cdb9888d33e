"""Waiting a moment for pods that come one after the other, so that they are planned together.

In a large cluster the first pod of a plan costs kube-scheduler a look at thousands of nodes, and those that
are planned beside it, and nominated, cost it one node each. VMs of a rollout arrive some dozens a second;
without a pause nearly each would be the first one.
"""

from __future__ import annotations

import asyncio
import contextlib

from kvplace.scheduler.waiting_pods import WaitingPods

STREAM_S = 1.0
"""A pod that comes so long after the one before comes alone, and does not wait for others."""
GATHER_S = 0.25
"""How long a pod waits for others at most: at thirty pods a second for seven of them."""
QUIET_S = 0.1
"""When no pod has come for so long, the stream has ended."""


class Gathering:
    """Notices pods that come in a stream, and has the first of them wait for some more."""

    def __init__(self, waiting: WaitingPods) -> None:
        self._waiting = waiting
        self._last = float("-inf")
        self._arrived = 0

    async def gather(self, shape: bytes, enough: int) -> None:
        """Wait until `enough` pods of a shape wait, if and while pods come in a stream, not for long.

        Where none has come since the last time, all pods of a rollout are there already.
        """
        loop = asyncio.get_running_loop()
        if self._waiting.arrived > self._arrived and loop.time() - self._last < STREAM_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._waiting.until(shape, enough, quiet_s=QUIET_S)
        self._last = loop.time()
        self._arrived = self._waiting.arrived
