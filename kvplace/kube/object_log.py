"""The objects of one kind in the in-memory cluster, with the change log that watches follow.

Like etcd behind an API server: every change gets the next resource version and an entry in the log;
watches read the log at their own pace; compaction forgets the past, and a watch that still needs it
lists again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvplace.kube.watches import (
    EVERYTHING,
    Apply,
    Delete,
    Init,
    InitApply,
    InitDone,
    Kind,
    Selector,
    WatchEvent,
)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _LoggedObject(Generic[R]):
    record: R
    labels: Mapping[str, str] = field(default_factory=dict)


class ObjectLog(Generic[R]):
    """Current records by key, and how they became so."""

    def __init__(self, kind: Kind[Any, R], *, log_limit: int = 100_000) -> None:
        """Of a log longer than `log_limit` the older half is forgotten."""
        self._kind = kind
        self._objects: dict[Hashable, _LoggedObject[R]] = {}
        self._log_limit = log_limit
        self._log: list[tuple[_LoggedObject[R] | None, _LoggedObject[R] | None]] = []
        """Each object before and after a change."""
        self._forgotten = 0
        self._changed = asyncio.Event()
        self._paused = False
        self._closed = False

    @property
    def records(self) -> Mapping[Hashable, R]:
        """All records by key."""
        return {key: known.record for key, known in self._objects.items()}

    def get(self, key: Hashable) -> R | None:
        """Return the record of a key."""
        known = self._objects.get(key)
        return known.record if known is not None else None

    def selected(self, selector: Selector) -> tuple[R, ...]:
        """Return the records that a selector selects."""
        return tuple(
            known.record
            for known in self._objects.values()
            if selector.selects(self._kind, known.record, known.labels)
        )

    def labels(self, key: Hashable) -> Mapping[str, str]:
        """Return the labels of an object that is there."""
        return self._objects[key].labels

    def put(self, key: Hashable, record: R, labels: Mapping[str, str] | None = None) -> None:
        """Add or replace a record; without `labels` it keeps its labels."""
        before = self._objects.get(key)
        if labels is None:
            labels = before.labels if before is not None else {}
        self._objects[key] = after = _LoggedObject(record, labels)
        self._append(before, after)

    def remove(self, key: Hashable) -> None:
        """Remove a record, if it is there."""
        before = self._objects.pop(key, None)
        if before is not None:
            self._append(before, None)

    def compact(self) -> None:
        """Forget the log: watches that have not read all of it must list again."""
        self._forgotten += len(self._log)
        self._log.clear()
        self._wake()

    def relist_all(self) -> None:
        """Make every watch list again, as when its connection and the past are lost."""
        self.compact()
        self._forgotten += 1
        self._wake()

    def pause(self) -> None:
        """Report nothing more to watches until `resume`: their view grows stale."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self._wake()

    async def watch(self, selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        """Follow the selected objects from now on; ends only when the log is closed."""

        def selected(known: _LoggedObject[R] | None) -> R | None:
            if known is None or not selector.selects(self._kind, known.record, known.labels):
                return None
            return known.record

        position = -1
        while not self._closed:
            if self._paused:
                await self._changed.wait()
            elif position < self._forgotten:
                snapshot = [selected(known) for known in self._objects.values()]
                position = self._end
                yield Init()
                for record in snapshot:
                    if record is not None:
                        yield InitApply(record)
                yield InitDone()
            elif position < self._end:
                before, after = map(selected, self._log[position - self._forgotten])
                position += 1
                if after is not None:
                    yield Apply(after)
                elif before is not None:
                    yield Delete(before)
            else:
                await self._changed.wait()

    @property
    def _end(self) -> int:
        return self._forgotten + len(self._log)

    def _append(self, before: _LoggedObject[R] | None, after: _LoggedObject[R] | None) -> None:
        self._log.append((before, after))
        if len(self._log) > self._log_limit:
            keep = self._log_limit // 2
            self._forgotten += len(self._log) - keep
            del self._log[: len(self._log) - keep]
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
