"""List, then watch, without end: the state machine behind every cache, after kube-rs's watcher.

    Empty ──first page──▶ InitPage ──last page──▶ InitListed ──watch opened──▶ Watching
      ▲                      │ any failure            │ ▲  stream ended, broken    │
      └──────────────────────┴────────────────────────┘ └─────────────────────────┘
          the past is gone (410), or the answer cannot be read,     resumes from the last resource version
          or the version may be at fault

`step` makes one move and has no clock; `follow` repeats it and pauses after failures: growing pauses with
jitter, short ones again after a stream that worked. Streams that end, answers that stop in mid-line, versions
that expire (HTTP 410 or inside the stream) and servers that ask for a pause all lead to a state where it
continues.

Only failures that state nothing about the version are resumed from. After a restore of etcd the API server
may know nothing of it: kube-apiserver answers HTTP 500 to a version that it cannot read, and states nothing
to one that it has yet to reach, not even bookmarks. A list that is older than an earlier one is reported as
Corrupt: the process can then no longer trust its memory of its own writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from kvplace.core.errors import Corrupt, Forbidden, KvplaceError, Unavailable
from kvplace.kube.api_errors import ApiUnavailable, Backoff, Unreadable
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
"""A stream that lasted so long has worked: pauses after its end start short again."""


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


class Stream(Protocol[R_co]):
    """An open watch."""

    async def next(self) -> Change[R_co] | None:
        """Return the next change; None when the server has ended the watch."""
        ...

    async def close(self) -> None: ...


class ListWatch(Protocol[R_co]):
    """A resource that can be listed and watched."""

    @property
    def name(self) -> str:
        """The resource, for the log."""
        ...

    async def list_page(self, page: str) -> Page[R_co]:
        """Read the first page ('') or the one that an earlier page named."""
        ...

    async def open_watch(self, resource_version: str) -> Stream[R_co]:
        """Watch from just after that version."""
        ...


@dataclass(frozen=True, slots=True)
class Empty:
    """Nothing is known; a list begins. A failure leads back here."""


@dataclass(frozen=True, slots=True)
class InitPage:
    """A list is under way. Any failure, an expired page included, leads to Empty: the list begins again."""

    next_page: str


@dataclass(frozen=True, slots=True)
class InitListed:
    """The list is complete. Failure to open the watch leads back here, to Empty when that may be because of
    the version.
    """

    resource_version: str


@dataclass(frozen=True, slots=True)
class Watching(Generic[R]):
    """The watch is open. Its end and its failures lead to InitListed, to Empty when it cannot be resumed."""

    resource_version: str
    stream: Stream[R]


State: TypeAlias = Empty | InitPage | InitListed | Watching[R]


@dataclass(frozen=True, slots=True)
class WatchStep(Generic[R]):
    """One move: the events, the next state, and the failure if there was one."""

    events: tuple[WatchEvent[R], ...]
    state: State[R]
    failure: KvplaceError | None = None


class Ended(Unavailable):
    """The server has ended a watch, which is usual."""


async def step(source: ListWatch[R], state: State[R]) -> WatchStep[R]:
    """Make one move; failures of the cluster are part of the result, never raised."""
    match state:
        case Empty():
            return await _list(source, "", (Init(),))
        case InitPage(next_page):
            return await _list(source, next_page, ())
        case InitListed(version):
            try:
                return WatchStep((), Watching(version, await source.open_watch(version)))
            except KvplaceError as error:
                is_at_fault = isinstance(error, ApiUnavailable) and error.status == _INTERNAL
                return WatchStep((), Empty() if is_at_fault else _after_failure(error, version), error)
        case Watching(version, stream):
            return await _watch(stream, version)


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
    seen = ""
    state: State[R] = Empty()
    opened = clock()
    try:
        while not closed():
            was_watching = isinstance(state, Watching)
            was_listing = isinstance(state, Empty | InitPage)
            move = await step(source, state)
            state = move.state
            if isinstance(state, InitListed | Watching):
                if was_listing and is_older(state.resource_version, seen):
                    yield Interrupted(_gone_back(source.name, seen, state.resource_version))
                seen = state.resource_version
            for event in move.events:
                yield event
            if move.failure is None and not move.events:
                yield Alive()
            if isinstance(state, Watching) and not was_watching:
                opened = clock()
            if was_watching and (move.events or clock() - opened >= LIVED_S):
                failures = 0
            if move.failure is not None and not closed():
                seconds = backoff.pause(failures, move.failure)
                failures += 1
                _report(source.name, move.failure, seconds)
                if not isinstance(move.failure, Ended):
                    yield Interrupted(move.failure)
                await pause(seconds)
    finally:
        if isinstance(state, Watching):
            await state.stream.close()


async def _list(source: ListWatch[R], page: str, events: tuple[WatchEvent[R], ...]) -> WatchStep[R]:
    try:
        answer = await source.list_page(page)
    except KvplaceError as error:
        return WatchStep((), Empty(), error)
    events += tuple(InitApply(record) for record in answer.records)
    if answer.next_page:
        return WatchStep(events, InitPage(answer.next_page))
    if not answer.resource_version:
        return WatchStep((), Empty(), Unreadable(f"list {source.name}: the answer has no resource version"))
    return WatchStep((*events, InitDone()), InitListed(answer.resource_version))


async def _watch(stream: Stream[R], version: str) -> WatchStep[R]:
    try:
        change = await stream.next()
    except KvplaceError as error:
        await stream.close()
        return WatchStep((), _after_failure(error, version), error)
    if change is None:
        await stream.close()
        return WatchStep((), InitListed(version), Ended("the API server ended the watch"))
    events = () if change.event is None else (change.event,)
    return WatchStep(events, Watching(change.resource_version or version, stream))


def _after_failure(error: KvplaceError, version: str) -> Empty | InitListed:
    """Return the state after a failed watch: one that perhaps cannot be resumed is listed again."""
    return InitListed(version) if isinstance(error, ApiUnavailable | Forbidden) else Empty()


def _gone_back(name: str, seen: str, listed: str) -> Corrupt:
    return Corrupt(
        f"the history of {name} has gone back from version {seen} to {listed}, as a restore of etcd does"
    )


def _report(name: str, failure: KvplaceError, seconds: float) -> None:
    level = logging.DEBUG if isinstance(failure, Ended) else logging.WARNING
    _log.log(level, "watching %s: %s; trying again in %.1f s", name, failure, seconds)
