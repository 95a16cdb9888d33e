"""Reports changes to open pages: server-sent events, gathered, bounded and able to resume.

Changes gather for a second and go to all readers together. Nothing is queued for a page: a slow page gets the
changes since its revision once it can take more. A page that comes back names the last revision that it has
seen (Last-Event-ID); where this process does not know the changes since then, the page loads everything anew.
Without a page open nothing is computed. Pages also learn that a watch of the cluster fails: their content may
then be old.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec

from kvplace.core.errors import Unavailable
from kvplace.kube.store import Store
from kvplace.web.node_rows import NodeRows

GATHER_S = 1.0
_PATIENCE_S = 30.0
"""How long a watch may fail before pages report it."""
RELOAD = b"event: reload\ndata: {}\n\n"


class Feed:
    """The changes of the rows, for any number of streams up to a limit."""

    def __init__(
        self,
        rows: NodeRows,
        stores: Sequence[Store[Any, Any]],
        *,
        streams: int,
        heartbeat_s: float = 15.0,
        gather_s: float = GATHER_S,
    ) -> None:
        """The rows are made from `stores`."""
        self._stores = stores
        self._rows = rows
        self._most = streams
        self._gather_s = gather_s
        self._heartbeat_s = heartbeat_s
        self._instance = secrets.token_hex(6)
        self._streams = 0
        self._opened = asyncio.Event()
        self._news = asyncio.Event()
        self._ended = False
        self._announced = rows.revision

    @property
    def position(self) -> str:
        """The newest revision, as pages name it."""
        return f"{self._instance}-{self._rows.revision}"

    async def run(self) -> None:
        """Search for changes while any page follows, until cancelled."""
        while True:
            await self._opened.wait()
            await self._rows.stale.wait()
            if not self._streams:
                self._opened.clear()
                continue
            await self.refresh()
            await asyncio.sleep(self._gather_s)

    async def refresh(self) -> None:
        """Bring the rows up to date, and send the changes to every page."""
        await self._rows.refresh()
        if self._rows.revision != self._announced:
            self._announced = self._rows.revision
            self._announce()

    def end(self) -> None:
        """End all streams: the process stops."""
        self._ended = True
        self._announce()

    def outage(self) -> str:
        """State why the pages may be old; empty while the watches of the cluster work."""
        failing = [store for store in self._stores if store.failing_s >= _PATIENCE_S]
        if not failing:
            return ""
        longest = max(failing, key=lambda store: store.failing_s)
        return f"watching {longest.kind.name} has failed for {longest.failing_s:.0f} s: {longest.failure}"

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a page that follows, while the block runs; raises Unavailable when too many do already."""
        if self._streams >= self._most:
            raise Unavailable(f"{self._most} pages follow the cluster already; close one, or try later")
        self._streams += 1
        self._opened.set()
        try:
            yield
        finally:
            self._streams -= 1

    async def follow(self, position: str) -> AsyncGenerator[bytes]:
        """Yield messages from a position on: changes, heartbeats, or that everything must be loaded anew."""
        revision = self._revision_of(position)
        while revision is not None and not self._ended:
            news = self._news
            if revision == self._rows.revision:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await news.wait()
                except TimeoutError:
                    yield b"event: heartbeat\ndata: %s\n\n" % msgspec.json.encode({"outage": self.outage()})
                continue
            newest, message = self._rows.revision, self._message(revision)
            if message is None:
                break
            revision = newest
            yield message
        if not self._ended:
            yield RELOAD

    def _announce(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _revision_of(self, position: str) -> int | None:
        instance, _, number = position.partition("-")
        if instance != self._instance or not (number.isascii() and number.isdigit() and len(number) < 16):
            return None
        return int(number)

    def _message(self, revision: int) -> bytes | None:
        """Write the changes since the revision of a page; None where they are not known any more."""
        changes = self._rows.since(revision)
        if changes is None:
            return None
        document = {"nodes": changes.rows, "gone": changes.gone, "totals": self._rows.totals()}
        return b"id: %s\nevent: changes\ndata: %s\n\n" % (
            self.position.encode(),
            msgspec.json.encode(document),
        )
