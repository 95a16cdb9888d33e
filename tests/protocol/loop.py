"""An event loop in virtual time that runs what is ready in an order that a seed decides.

It has no selector, no threads and no signals, so a step costs a tenth of what it costs on a real loop. After
each step it calls back, so that nothing a step breaks can be mended by the next one unseen.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any


class Standstill(RuntimeError):
    """Every task waits for something that nobody will do."""


class SeededLoop(asyncio.BaseEventLoop):
    """Sleepers wake at once, in the order of their times; those that are ready together, in any order."""

    _ready: Any  # of BaseEventLoop: the handles that are due
    _stopping: bool

    def __init__(self, random: Random, *, disorder: float, after_step: Callable[[], None]) -> None:
        """`disorder` is how often what is ready together runs in another order than it became ready."""
        super().__init__()
        self.steps = 0
        """How many steps have been made."""
        self._random = random
        self._disorder = disorder
        self._after_step = after_step
        self._moment = 0.0
        self._serial = itertools.count()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._alarms: list[tuple[int, int, asyncio.Future[None]]] = []

    def time(self) -> float:
        return self._moment

    def after_steps(self, steps: int) -> asyncio.Future[None]:
        """Return what is done when so many more steps have been made, whoever made them."""
        alarm: asyncio.Future[None] = self.create_future()
        heapq.heappush(self._alarms, (self.steps + steps, next(self._serial), alarm))
        return alarm

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._serial), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave it where it is: it is passed over when its time comes."""

    def _write_to_self(self) -> None:
        """Wake nobody: there is no other thread."""

    def _run_once(self) -> None:
        if not self._ready:
            self._pass_time()
        due = list(self._ready)
        self._ready.clear()
        if len(due) > 1 and self._random.random() < self._disorder:
            self._random.shuffle(due)
        for handle in due:
            if not handle.cancelled():
                self.steps += 1
                handle._run()
                self._after_step()
        while self._alarms and self._alarms[0][0] <= self.steps:
            alarm = heapq.heappop(self._alarms)[2]
            if not alarm.done():
                alarm.set_result(None)

    def _pass_time(self) -> None:
        """Let time pass until somebody is due."""
        timers = self._timers
        while not self._ready:
            if not timers:
                if self._stopping:
                    return
                raise Standstill("every task waits for something that nobody will do")
            when, _, handle = heapq.heappop(timers)
            if handle.cancelled():
                continue
            self._moment = max(self._moment, when)
            self._ready.append(handle)
            while timers and timers[0][0] <= self._moment:
                handle = heapq.heappop(timers)[2]
                if not handle.cancelled():
                    self._ready.append(handle)
