"""The life of a long-running process: signals, background work, last error, log, health and metrics.

A log line is one JSON object on stderr, with the same keys everywhere. Health and metrics are served over
plain HTTP on a port of their own, so that a probe never waits behind a queue of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest

from kvplace.core.errors import KvplaceError

_log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder(enc_hook=str).encode
_CONTEXT = ("pod", "vm", "node", "uid", "attempt", "review")

LOOP_DELAYS = Histogram(
    "kvplace_process_loop_delay_seconds",
    "How much later than due the event loop came to a timer, four times a second.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0),
)
READY = Gauge(
    "kvplace_process_ready",
    "1 while /readyz of this process answers 200, else 0; process: serve, agent or certificates.",
    ["process"],
)
CERTIFICATE_END = Gauge(
    "kvplace_process_certificate_end_timestamp_seconds",
    "When the certificates of a file end, the first of them, as Unix time; use: server or client-ca.",
    ["use"],
)
CUT_CONNECTIONS = Counter(
    "kvplace_process_cut_connections_total",
    "Connections that were not served, by listener and reason: full, handshake, client, slow, bytes.",
    ["listener", "reason"],
)

_EVERY_S = 0.25


def run_until_signal(service: AbstractAsyncContextManager[object]) -> None:
    """Run a service until SIGTERM or SIGINT, also while it starts; it ends with its own `__aexit__`.

    Raises the KvplaceError that ended it, also from a group of tasks that ended together.
    """
    try:
        asyncio.run(_run(service))
    except BaseExceptionGroup as group:
        raise kvplace_error_in(group) or group from group


@contextlib.asynccontextmanager
async def in_background(*work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run endless work while the block runs; work that fails ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _run(service: AbstractAsyncContextManager[object]) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:  # a second signal must not cut off requests that the first one lets finish
            stopping = True
            _log.info("stopping: requests that have begun are answered")
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        async with service:
            await loop.create_future()
    except asyncio.CancelledError:
        if not stopping:
            raise


def kvplace_error_in(group: BaseExceptionGroup[BaseException]) -> KvplaceError | None:
    """Find the error of ours in a group of tasks that ended together."""
    for error in group.exceptions:
        found = kvplace_error_in(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, KvplaceError):
            return found
    return None


class JsonLines(logging.Formatter):
    """Writes a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "msg": record.getMessage(),
            "component": record.name.removeprefix("kvplace.").partition(".")[0],
        }
        line |= {key: getattr(record, key) for key in _CONTEXT if hasattr(record, key)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def log_as_json(level: str) -> None:
    """Send all logging to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


class Series:
    """The series of a gauge with nodes or pods in its labels: only the series of the last update exist."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._values: dict[tuple[str, ...], float] = {}

    def update(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Set the series with these label values, and remove all others."""
        for labels in self._values.keys() - values.keys():
            self._gauge.remove(*labels)
            del self._values[labels]
        for labels, value in values.items():
            if self._values.get(labels) != value:
                self._gauge.labels(*labels).set(value)
                self._values[labels] = value


async def watch_loop() -> None:
    """Measure the delay of the event loop until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _EVERY_S
        await asyncio.sleep(_EVERY_S)
        LOOP_DELAYS.observe(max(0.0, loop.time() - due))


@dataclass(frozen=True, slots=True)
class Health:
    """An answer of `/readyz`."""

    is_ready: bool
    sentence: str


@dataclass(slots=True)
class Readiness:
    """Whether the process can serve: ready while there is no obstacle."""

    obstacle: str
    """One sentence for `/readyz`; empty when ready."""

    def health(self) -> Health:
        """Return whether the process can serve, or why not."""
        return Health(not self.obstacle, self.obstacle or "ok")


async def _nothing() -> None:
    """Prepare nothing."""


def health_application(
    process: str, readiness: Readiness, before_scrape: Callable[[], Awaitable[None]] = _nothing
) -> web.Application:
    """Serve /healthz, /readyz and /metrics of a process; `before_scrape` brings gauges up to date.

    One scrape runs at a time. Clients that ask meanwhile share the next one, however many they are.
    """
    scraping = asyncio.Lock()
    begun, text = 0, b""

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        health = readiness.health()
        return web.Response(status=200 if health.is_ready else 503, text=f"{health.sentence}\n")

    async def metrics(_: web.Request) -> web.Response:
        nonlocal begun, text
        begun_before = begun
        async with scraping:
            if begun == begun_before or not text:
                begun, text = begun + 1, b""
                await before_scrape()
                READY.labels(process).set(readiness.health().is_ready)
                text = generate_latest()
            return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes(
        [web.get("/healthz", alive), web.get("/readyz", ready), web.get("/metrics", metrics)]
    )
    return application
