"""List, then watch, without end: the source of every cache, after kube-rs's watcher.

A complete list is followed by a watch from its version. A watch that ends or breaks is opened again from the
last version. The list begins again where the past is gone (410), where the answer cannot be read, and where
the version may be at fault. After failures there are growing pauses with jitter, and short ones again after a
watch that worked. Watches that end, answers that stop in mid-line, versions that expire (HTTP 410 or inside
the watch) and servers that ask for a pause all lead to another attempt.

Only failures that state nothing about the version are resumed from. After a restore of etcd the API server
may know nothing of it: kube-apiserver answers HTTP 500 to a version that it cannot read, and states nothing
to one that it has yet to reach, not even bookmarks. A list that is older than an earlier one is reported as
Corrupt: the process can then no longer trust its memory of its own writes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvplace.core.errors import Corrupt, Forbidden, KvplaceError, Unavailable
from kvplace.kube.api_errors import ApiUnavailable, Backoff, UnusableAnswer
from kvplace.kube.watches import Alive, Apply, Delete, Init, InitApply, InitDone, Interrupted, WatchEvent


def is_newer(version: str, known: str) -> bool:
    """Whether a version is newer than another one of the same kind, even of an object that is gone.

    Resource versions are numbers that grow over all objects of a kind (KEP-5504); of others only equality is
    known. An empty one stands for none, which is older than all.
    """
    if not version or not known:
        return bool(version)
    if version.isdigit() and known.isdigit():
        return int(version) > int(known)
    return version != known


def is_older(version: str, known: str) -> bool:
    """Whether a version is certainly older than another one of the same kind."""
    return version.isdigit() and known.isdigit() and int(version) < int(known)


R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_log = logging.getLogger(__name__)

_INTERNAL = 500
"""The HTTP status for a version that kube-apiserver cannot read; for one that is too old it is 410."""
LIVED_S = 30.0
"""A watch that lasted so long has worked: pauses after its end start short again."""


@dataclass(frozen=True, slots=True)
class Page(Generic[R_co]):
    """One page of a list; an empty `next_page` ends it."""

    records: tuple[R_co, ...]
    next_page: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class Change(Generic[R_co]):
    """One line of a watch: an event, or a bookmark, which only moves the resource version."""

    event: Apply[R_co] | Delete[R_co] | None
    resource_version: str


class ListWatch(Protocol[R_co]):
    """A resource that can be listed and watched."""

    @property
    def name(self) -> str:
        """The resource, for the log."""
        ...

    async def list_page(self, page: str) -> Page[R_co]:
        """Read the first page ('') or the one that an earlier page named."""
        ...

    def changes(self, resource_version: str) -> AsyncGenerator[Change[R_co]]:
        """Watch from just after that version, until the server ends the watch.

        The first change is a bookmark of that version as soon as the watch is open.
        """
        ...


class Ended(Unavailable):
    """The server has ended a watch, which is usual."""


async def follow(
    source: ListWatch[R],
    *,
    pause: Callable[[float], Awaitable[None]],
    closed: Callable[[], bool] = lambda: False,
    backoff: Backoff | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[WatchEvent[R]]:
    """Yield every event, until the source is closed."""
    backoff = backoff or Backoff()
    failures = 0
    version = seen = ""
    """`version` is empty until a list is complete; `seen` is the last one that was known."""
    while not closed():
        opened: float | None = None
        try:
            if not version:
                async for event, listed in _list(source, seen):
                    version = listed
                    yield event
            seen = version
            async with contextlib.aclosing(source.changes(version)) as changes:
                async for change in changes:
                    version = seen = change.resource_version or version
                    yield Alive() if change.event is None else change.event
                    if opened is None:
                        opened = clock()
                    if change.event is not None:
                        failures = 0
                    if closed():
                        return
            raise Ended("the API server ended the watch")
        except KvplaceError as error:
            failure = error
        if closed():
            return
        if opened is not None and clock() - opened >= LIVED_S:
            failures = 0
        if not resumes(failure, was_open=opened is not None):
            version = ""
        seconds = backoff.pause(failures, failure)
        failures += 1
        _report(source.name, failure, seconds)
        if not isinstance(failure, Ended):
            yield Interrupted(failure)
        await pause(seconds)


async def _list(source: ListWatch[R], seen: str) -> AsyncIterator[tuple[WatchEvent[R], str]]:
    """Yield the events of a list, each with the version of the list, which is empty before the last page."""
    page = version = ""
    while not version:
        found = await source.list_page(page)
        if not found.next_page:
            version = found.resource_version
            if not version:
                raise UnusableAnswer(f"list {source.name}: the answer has no resource version")
            if is_older(version, seen):
                yield Interrupted(_gone_back(source.name, seen, version)), version
        if not page:
            yield Init(), version
        for record in found.records:
            yield InitApply(record), version
        page = found.next_page
    yield InitDone(), version


def resumes(failure: KvplaceError, *, was_open: bool) -> bool:
    """Whether a watch that failed is opened again from its version; otherwise the list begins again."""
    if isinstance(failure, ApiUnavailable):
        return was_open or failure.status != _INTERNAL
    return isinstance(failure, Ended | Forbidden)


def _gone_back(name: str, seen: str, listed: str) -> Corrupt:
    return Corrupt(
        f"the history of {name} has gone back from version {seen} to {listed}, as a restore of etcd does"
    )


def _report(name: str, failure: KvplaceError, seconds: float) -> None:
    level = logging.DEBUG if isinstance(failure, Ended) else logging.WARNING
    _log.log(level, "watching %s: %s; trying again in %.1f s", name, failure, seconds)
