"""A synced cache of one kind: the records of a watch by key, with a call for every difference.

Readers see the state of one moment: a list that replaces another one is collected aside and swapped in on
InitDone, and subscribers then get all differences, deletions included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from kvplace.core.errors import Corrupt, KvplaceError
from kvplace.kube.watches import (
    EVERYTHING,
    Alive,
    Apply,
    Delete,
    Init,
    InitApply,
    InitDone,
    Interrupted,
    Kind,
    Selector,
    WatchClient,
    WatchEvent,
)

K = TypeVar("K")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class Store(Generic[K, R]):
    """The selected records of one kind, kept up to date by `run`."""

    def __init__(
        self,
        kind: Kind[K, R],
        selector: Selector = EVERYTHING,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` times the silence of the watch."""
        self.kind = kind
        self.failure: KvplaceError | None = None
        """Why the watch or its list does not work at the moment; None while it does."""
        self._clock = clock
        self._heard_at = clock()
        self._failed_at: float | None = None
        self.outages = 0
        """How often the watch or its list has begun to fail."""
        self.selector = selector
        self._records: dict[K, R] = {}
        self._incoming: dict[K, R] | None = None
        self._subscribers: list[Callable[[R | None, R | None], None]] = []
        self._synced = asyncio.Event()

    @property
    def records(self) -> Mapping[K, R]:
        """The records of this moment, by key; a view that changes only between awaits."""
        return MappingProxyType(self._records)

    @property
    def has_synced(self) -> bool:
        """Whether a complete list has been seen once."""
        return self._synced.is_set()

    @property
    def silent_s(self) -> float:
        """Seconds since the API server was last heard about this kind, be it by a bookmark."""
        return self._clock() - self._heard_at

    @property
    def failing_s(self) -> float:
        """Seconds since the watch began to fail; 0 while it works."""
        return 0.0 if self._failed_at is None else self._clock() - self._failed_at

    async def wait_until_synced(self) -> None:
        await self._synced.wait()

    def get(self, key: K) -> R | None:
        return self._records.get(key)

    def subscribe(self, callback: Callable[[R | None, R | None], None]) -> None:
        """Call back with (old, new) for every difference, in order; existing records come at once.

        None stands for a record that did not exist before, or does not exist any more. The store is in the
        new state already. A callback that raises is logged and does not stop the others.
        """
        self._subscribers.append(callback)
        for record in list(self._records.values()):
            self._call(callback, None, record)

    async def run(self, cluster: WatchClient) -> None:
        """Follow the cluster until cancelled or until it is closed."""
        async for event in cluster.watch(self.kind, self.selector):
            self.apply(event)

    async def run_in_one_past(self, cluster: WatchClient) -> None:
        """The same for a process that remembers its writes; raises Corrupt when the past has changed."""
        async for event in cluster.watch(self.kind, self.selector):
            self.apply(event)
            if isinstance(self.failure, Corrupt):
                raise self.failure

    def apply(self, event: WatchEvent[R]) -> None:
        """Take in one event of a watch."""
        if isinstance(event, Interrupted):
            self.failure = event.failure
            if self._failed_at is None:
                self._failed_at = self._clock()
                self.outages += 1
            return
        self._heard_at, self._failed_at, self.failure = self._clock(), None, None
        match event:
            case Alive():
                pass
            case Init():
                self._incoming = {}
            case InitApply(record):
                if self._incoming is not None:
                    key = self.kind.key(record)
                    known = self._records.get(key)
                    # An equal record is kept, so that the swap need not compare unchanged records.
                    self._incoming[key] = known if known == record and known is not None else record
            case InitDone():
                self._swap()
            case Apply(record):
                key = self.kind.key(record)
                old = self._records.get(key)
                self._records[key] = record
                self._notify(old, record)
            case Delete(record):
                old = self._records.pop(self.kind.key(record), None)
                if old is not None:
                    self._notify(old, None)

    def _swap(self) -> None:
        before, self._records = self._records, self._incoming or {}
        self._incoming = None
        for key, old in before.items():
            if key not in self._records:
                self._notify(old, None)
        for key, record in list(self._records.items()):
            known = before.get(key)
            if known is not record and known != record:
                self._notify(known, record)
        self._synced.set()

    def _notify(self, old: R | None, new: R | None) -> None:
        for callback in self._subscribers:
            self._call(callback, old, new)

    def _call(self, callback: Callable[[R | None, R | None], None], old: R | None, new: R | None) -> None:
        try:
            callback(old, new)
        except Exception:
            _log.exception("a subscriber of %s failed; its view may be stale", self.kind.name)
