"""An event loop in a thread of its own, for servers that run beside a synchronous test."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Carries out coroutines on its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Carry out a coroutine and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@contextlib.contextmanager
def loop_thread(name: str) -> Iterator[LoopThread]:
    """Run a loop until the block ends; tasks that still run on it then are cancelled."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
        thread.start()
        try:
            yield LoopThread(loop)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
