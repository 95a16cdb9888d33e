"""Watches of a source that answers from a script, and what watches report over real connections."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.api_errors import ApiUnavailable, Backoff
from kvplace.kube.list_watch import Change, Page, follow
from kvplace.kube.session import Limits, open_session
from kvplace.kube.watches import EVERYTHING, PODS, Alive, Interrupted, Selector, WatchEvent
from tests.kube.api_stub import ApiStub
from tests.kube.api_stub import answer as json_answer


class Script:
    """A source that returns the given answers in order, and raises a failure among them."""

    name = "things"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []
        self.closed = 0

    def take(self, question: str, argument: str = "") -> Any:
        self.asked.append((question, argument))
        if not self.answers:
            raise StopTest
        given = self.answers.pop(0)
        if isinstance(given, BaseException):
            raise given
        return given

    async def list_page(self, page: str) -> Page[str]:
        return cast(Page[str], self.take("list", page))

    async def changes(self, resource_version: str) -> AsyncGenerator[Change[str]]:
        self.take("watch", resource_version)
        try:
            yield Change(None, resource_version)
            while (change := cast("Change[str] | None", self.take("next"))) is not None:
                yield change
        finally:
            self.closed += 1


class StopTest(Exception):
    """The script is at its end."""


def unavailable(retry_after: float | None = None) -> ApiUnavailable:
    return ApiUnavailable("the server is away", retry_after=retry_after)


class Pauses:
    """Keeps the pauses that were asked for, without waiting."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


async def run_out(source: Script, pauses: Pauses, clock: Any = lambda: 0.0) -> list[WatchEvent[str]]:
    """Follow until the script ends; returns the events that state what there is."""
    received: list[WatchEvent[str]] = []
    backoff = Backoff(first_s=1, longest_s=16, jitter=lambda: 1.0)
    events = follow(source, pause=pauses, backoff=backoff, clock=clock)
    while True:
        try:
            event = await anext(events)
            if not isinstance(event, Alive | Interrupted):
                received.append(event)
        except StopTest:
            return received


def pod(name: str, version: int, **other: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": {"a": "b"},
        },
        **other,
    }


def page(*items: Any, version: int, more: str = "") -> Any:
    metadata = {"resourceVersion": str(version), "continue": more}
    return json_answer({"kind": "PodList", "metadata": metadata, "items": list(items)})


def line(kind: str, body: Any) -> bytes:
    return json.dumps({"type": kind, "object": body}).encode() + b"\n"


async def reported(
    stub: ApiStub,
    folder: Path,
    count: int,
    kind: Any = PODS,
    limits: Limits | None = None,
    selector: Selector = EVERYTHING,
) -> list[Any]:
    """The first `count` events that state what there is, shortened to (what, name or node)."""
    session = await open_session(stub.kubeconfig(folder, token="t"), limits or Limits())
    session.pause = Pauses()  # type: ignore[method-assign]
    seen = []
    async with session, aclosing(cast(Any, ApiCluster(session).watch(kind, selector))) as events:
        async for event in events:
            if isinstance(event, Alive | Interrupted):
                continue
            record = getattr(event, "record", None)
            name = getattr(record, "name", None) or getattr(record, "node", "")
            seen.append((type(event), name))
            if len(seen) == count:
                break
    return seen
