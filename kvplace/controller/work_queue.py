"""The nodes whose ledgers are to be reconciled, and when."""

from __future__ import annotations

import asyncio
from zlib import crc32

from kvplace.core.scalars import NodeName


class WorkQueue:
    """Nodes by the time at which they are due: each is in the queue once, with the earliest of its times.

    Each replica adds a delay of its own for each node, from a hash of both names. So replicas seldom do the
    same work, and none needs to know how many others there are.
    """

    def __init__(self, *, replica: str, spread_s: float) -> None:
        """`spread_s` is the longest of these delays."""
        self._replica = replica
        self._spread_s = spread_s
        self._due: dict[NodeName, float] = {}
        self._changed = asyncio.Event()

    def add(self, node: NodeName, *, after_s: float = 0.0) -> None:
        """Make a node due after some seconds, unless it is due earlier."""
        share = crc32(f"{node} {self._replica}".encode()) / 0xFFFFFFFF
        due = asyncio.get_running_loop().time() + after_s + share * self._spread_s
        self._due[node] = min(due, self._due.get(node, due))
        self._changed.set()

    async def take(self) -> list[NodeName]:
        """Wait until nodes are due; returns these and removes them."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            ready = [node for node, due in self._due.items() if due <= loop.time()]
            for node in ready:
                del self._due[node]
            if ready:
                return ready
            try:
                async with asyncio.timeout_at(min(self._due.values(), default=None)):
                    await self._changed.wait()
            except TimeoutError:
                continue
