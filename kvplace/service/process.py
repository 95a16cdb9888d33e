"""The life of a long-running process: its signals, its background work, its last error and its log.

A log line is one JSON object on stderr, with the same keys everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime

import msgspec

from kvplace.core.errors import KvplaceError

_log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder(enc_hook=str).encode
_CONTEXT = ("pod", "vm", "node", "uid", "attempt", "review")


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
        if not stopping:  # a second signal must not cut off what the first one lets finish
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
