"""The nodes with ledgers to reconcile, and when."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from math import inf
from zlib import crc32

from kvplace.core.scalars import NodeName


class WorkQueue:
    """Nodes by their due time: each is in the queue once, with the earliest of its times.

    A node that becomes due while it is being worked on is taken again after that, never twice at once. Each
    replica adds a delay of its own for each node, from a hash of both names. So replicas seldom do the same
    work, and none needs to know how many others there are.
    """

    def __init__(self, *, replica: str, spread_s: float) -> None:
        """`spread_s` is the longest of these delays."""
        self._replica = replica
        self._spread_s = spread_s
        self._due: dict[NodeName, float] = {}
        self._order: list[tuple[float, NodeName]] = []
        """A heap that has the entries of `_due`, and some that have been replaced by earlier ones."""
        self._under_work: set[NodeName] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, node: NodeName, *, after_s: float = 0.0) -> None:
        """Make a node due after some seconds, unless it is due earlier."""
        share = crc32(f"{node} {self._replica}".encode()) / 0xFFFFFFFF
        due = asyncio.get_running_loop().time() + after_s + share * self._spread_s
        if due < self._due.get(node, inf):
            self._due[node] = due
            heappush(self._order, (due, node))
            self._changed.set()

    async def take(self) -> NodeName:
        """Wait until a node is due and remove it; it is worked on until `done` is called with it."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            while self._order and self._order[0][0] <= loop.time():
                due, node = heappop(self._order)
                if self._due.get(node) == due and node not in self._under_work:
                    del self._due[node]
                    self._under_work.add(node)
                    return node
            alarm = loop.call_at(self._order[0][0], self._changed.set) if self._order else None
            try:
                await self._changed.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()

    def done(self, node: NodeName) -> None:
        """Note that the work on a node has ended."""
        self._under_work.discard(node)
        if node in self._due:
            heappush(self._order, (self._due[node], node))
            self._changed.set()
