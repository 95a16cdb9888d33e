"""One agent on a node: a second one waits until the first has ended.

Two instances of one NRI plugin that both set CPUs make the runtime refuse every container, and two agents
that enforce undo each other's work. During an update, or after a user has started an agent by hand, there
may be two for a while. The lock is a file on the host that the kernel unlocks when its holder ends, however
it ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from kvplace.core.errors import Misconfigured

log = logging.getLogger(__name__)

LOCK = Path("/run/kvplace/agent.lock")


@asynccontextmanager
async def only_instance(lock: Path, waiting: Callable[[str], None]) -> AsyncIterator[None]:
    """Be the only one that holds the lock while the block runs.

    `waiting` is called, with the reason, when another one holds it. Raises Misconfigured when the file cannot
    be opened.
    """
    try:
        lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Misconfigured(f"{lock} cannot be opened: {error.strerror}; mount its folder writable") from None
    try:
        if not _try_lock(descriptor):
            other = _holder(descriptor)
            why = f"Another agent runs on this node (process {other}); this one waits for its end."
            log.warning(why)
            waiting(why)
            await _locked(descriptor)
            log.info("the other agent has ended")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d" % os.getpid(), 0)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"


async def _locked(descriptor: int) -> None:
    """Wait for the lock in a thread of its own, which may wait longer than anything needs it."""
    loop = asyncio.get_running_loop()
    locked: asyncio.Future[None] = loop.create_future()
    shared = os.dup(descriptor)

    def tell() -> None:
        if not locked.done():
            locked.set_result(None)

    def wait() -> None:
        try:
            fcntl.flock(shared, fcntl.LOCK_EX)
        finally:
            os.close(shared)  # it stays locked as long as `descriptor` is open
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=wait, name="agent-lock", daemon=True).start()
    await locked
