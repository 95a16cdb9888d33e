"""SIGINT and SIGTERM for commands on an event loop: they act only between two steps.

`asyncio.run` cancels in the signal handler itself, between any two instructions of the program. Where that is
within a library's callback, the connection breaks under the clean-up that the cancellation is to run.

A signal cancels the command, or calls `on_interrupt` while its block runs. A second one ends the
program at once. A signal that is ignored, as a shell does for background jobs, stays ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ACTION: ContextVar[Callable[[], None] | None] = ContextVar("action", default=None)
"""What a signal does at the moment; None where the loop does not take signals."""


def run_until_interrupt(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; raises KeyboardInterrupt when a signal cancelled it, after its clean-up."""
    interrupted = False

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            nonlocal interrupted
            interrupted = True
            task.cancel()

        with on_interrupt(cancel):
            return await main

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if not interrupted:
            raise
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def on_interrupt(action: Callable[[], None] | None) -> Iterator[None]:
    """Let the first signal call `action` while the block runs; with None it ends the program at once.

    None is for a block that keeps the loop from running, which could not act on a signal.
    """
    token = _ACTION.set(action)
    _listen(action)
    try:
        yield
    finally:
        _ACTION.reset(token)
        _listen(_ACTION.get())


def _listen(action: Callable[[], None] | None) -> None:
    loop = asyncio.get_running_loop()
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def stop_listening() -> None:
        for number in heard:
            loop.remove_signal_handler(number)

    def act(of: Callable[[], None]) -> None:
        stop_listening()
        of()

    stop_listening()
    if action is not None:
        for number in heard:
            loop.add_signal_handler(number, act, action)
