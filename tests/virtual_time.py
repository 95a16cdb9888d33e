"""An event loop whose clock jumps: sleepers wake at once, in the right order, and hours cost nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for a time to pass it lets it pass."""

    def __init__(self) -> None:
        super().__init__()
        self.moment = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("every task waits for something that no client will do")
            self.moment += max(0.0, timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop for tests without real input or output."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.moment

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run until the work is done."""
        return self.run_until_complete(work)

    def finish(self) -> None:
        """End what still runs, and the loop."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run(asyncio.wait(tasks))
        self.run(self.shutdown_asyncgens())
        self.close()
