"""The objects of one kind in the in-memory cluster, with the change log that watches follow.

Like etcd behind an API server: every change gets the next resource version and an entry in the log;
watchers read the log at their own pace; compaction forgets the past, and whoever still needed it
lists anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Generic, TypeVar

from kvplace.kube.cluster import Apply, Delete, Init, InitApply, InitDone, WatchEvent

R = TypeVar("R")


class Shelf(Generic[R]):
    """Current records by key, and what happened to them."""

    def __init__(self, visible: Callable[[R], bool] = lambda _: True, *, log_limit: int = 100_000) -> None:
        """`visible` is the selector of watches: records it denies are stored but not shown.

        Of a log longer than `log_limit` the older half is forgotten.
        """
        self.records: dict[Hashable, R] = {}
        self._visible = visible
        self._log_limit = log_limit
        self._log: list[Apply[R] | Delete[R]] = []
        self._forgotten = 0
        self._changed = asyncio.Event()
        self._paused = False
        self._closed = False

    def put(self, key: Hashable, record: R) -> None:
        """Add or replace a record."""
        before = self.records.get(key)
        self.records[key] = record
        if self._visible(record):
            self._append(Apply(record))
        elif before is not None and self._visible(before):
            self._append(Delete(before))

    def remove(self, key: Hashable) -> R | None:
        """Take a record away; answers it."""
        record = self.records.pop(key, None)
        if record is not None and self._visible(record):
            self._append(Delete(record))
        return record

    def compact(self) -> None:
        """Forget the log: watchers that have not read all of it must list anew."""
        self._forgotten += len(self._log)
        self._log.clear()
        self._wake()

    def relist_all(self) -> None:
        """Make every watcher list anew, as when its connection and the past are lost."""
        self.compact()
        self._forgotten += 1
        self._wake()

    def pause(self) -> None:
        """Deliver nothing more to watchers until `resume`: their view grows stale."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self._wake()

    async def watch(self) -> AsyncIterator[WatchEvent[R]]:
        """Follow the shelf from now on; ends only when it is closed."""
        position = -1
        while not self._closed:
            if self._paused:
                await self._changed.wait()
            elif position < self._forgotten:
                snapshot = [record for record in self.records.values() if self._visible(record)]
                position = self._end
                yield Init()
                for record in snapshot:
                    yield InitApply(record)
                yield InitDone()
            elif position < self._end:
                event = self._log[position - self._forgotten]
                position += 1
                yield event
            else:
                await self._changed.wait()

    @property
    def _end(self) -> int:
        return self._forgotten + len(self._log)

    def _append(self, event: Apply[R] | Delete[R]) -> None:
        self._log.append(event)
        if len(self._log) > self._log_limit:
            keep = self._log_limit // 2
            self._forgotten += len(self._log) - keep
            del self._log[: len(self._log) - keep]
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
