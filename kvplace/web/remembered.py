"""Answers that are remembered for a while, so that many requests ask the API server once.

Bounded in three ways, since strangers can make us ask: how many answers are kept, how long each holds, and
how many questions are under way. Equal questions at one time are asked once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from kvplace.core.errors import Unavailable

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """Answers by question."""

    def __init__(
        self,
        seconds: Callable[[V], float],
        *,
        most: int = 1024,
        at_once: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds` states how long an answer holds."""
        self._seconds = seconds
        self._most = most
        self._at_once = at_once
        self._clock = clock
        self._answers: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._under_way: dict[K, asyncio.Task[V]] = {}

    async def get(self, question: K, ask: Callable[[], Awaitable[V]]) -> V:
        """Return the answer, asked now unless it is remembered.

        Raises what asking raises, which is not remembered, and Unavailable while too much is being asked.
        """
        known = self._answers.get(question)
        if known is not None and self._clock() < known[0]:
            return known[1]
        task = self._under_way.get(question)
        if task is None:
            if len(self._under_way) >= self._at_once:
                raise Unavailable("too many users are being checked at this moment; try again")
            task = asyncio.get_running_loop().create_task(self._ask(question, ask))
            self._under_way[question] = task
            task.add_done_callback(lambda _: self._under_way.pop(question, None))
        return await asyncio.shield(task)

    async def _ask(self, question: K, ask: Callable[[], Awaitable[V]]) -> V:
        answer = await ask()
        self._answers[question] = (self._clock() + self._seconds(answer), answer)
        self._answers.move_to_end(question)
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)
        return answer
