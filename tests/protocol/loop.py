"""An event loop in virtual time that runs what is ready in an order that a seed decides.

It has no selector, no threads and no signals, so a step costs a tenth of what it costs on a real loop. After
each step it calls back, so that nothing a step breaks can be fixed by the next one unseen.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from random import Random
from typing import Any


class Standstill(RuntimeError):
    """Every task waits for something that no client will do."""


class Livelock(RuntimeError):
    """A user does things again and again without waiting for anything, and no time passes."""


STEPS_AT_A_MOMENT = 100_000
"""So many mean a livelock."""


class Step:
    """A call that is due now or at its time: what the loop's base class calls a handle, at half its cost."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "moment")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None, moment: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context if context is not None else copy_context()
        self.moment = moment
        self.is_cancelled = False

    def when(self) -> float:
        return self.moment

    def cancel(self) -> None:
        """Make sure that it is passed over when its turn comes."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class _Task(asyncio.Task[Any]):
    """A task with its number as its hash: the order of a set of tasks is part of a story."""

    def __init__(
        self,
        number: int,
        coroutine: Coroutine[Any, Any, Any],
        loop: asyncio.AbstractEventLoop,
        name: object,
        context: Context | None,
    ) -> None:
        self._number = number
        super().__init__(coroutine, loop=loop, name=name, context=context)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self._number


class SeededLoop(asyncio.BaseEventLoop):
    """Sleepers wake at once, in the order of their times, and in any order at equal times."""

    _ready: Any  # of BaseEventLoop: the steps that are due
    _stopping: bool

    def __init__(self, random: Random, *, disorder: float, after_step: Callable[[], None]) -> None:
        """`disorder` is how often what is ready together runs in another order than it became ready."""
        super().__init__()
        self._ready = []
        self.steps = 0
        """How many steps have been made."""
        self._random = random
        self._disorder = disorder
        self._after_step = after_step
        self._moment = 0.0
        self._steps_before_moment = 0
        self._serial = itertools.count()
        self._timers: list[tuple[float, int, Step]] = []
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
    ) -> Step:
        step = Step(callback, args, context, self._moment)
        self._ready.append(step)
        return step

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Step:
        return self.call_at(self._moment + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Step:
        step = Step(callback, args, context, when)
        heapq.heappush(self._timers, (when, next(self._serial), step))
        return step

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coroutine: Coroutine[Any, Any, Any], *, name: object = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        return _Task(next(self._serial), coroutine, self, name, context)

    def _write_to_self(self) -> None:
        """Wake nothing: there is no other thread."""

    def _run_once(self) -> None:
        if not self._ready:
            self._pass_time()
        if self.steps - self._steps_before_moment > STEPS_AT_A_MOMENT:
            self._steps_before_moment = self.steps  # whoever ends the tasks needs steps, too
            raise Livelock(f"no time has passed for {STEPS_AT_A_MOMENT:,} steps")
        due, self._ready = self._ready, []
        if len(due) > 1 and self._random.random() < self._disorder:
            self._random.shuffle(due)
        after_step = self._after_step
        for step in due:
            if not step.is_cancelled:
                self.steps += 1
                try:
                    step.context.run(step.callback, *step.args)
                except Exception as error:  # as a handle does
                    self.call_exception_handler({"message": f"{step.callback} failed", "exception": error})
                after_step()
        while self._alarms and self._alarms[0][0] <= self.steps:
            alarm = heapq.heappop(self._alarms)[2]
            if not alarm.done():
                alarm.set_result(None)

    def _pass_time(self) -> None:
        """Let time pass until a user is due."""
        timers = self._timers
        while not self._ready:
            if not timers:
                if self._stopping:
                    return
                raise Standstill("every task waits for something that no client will do")
            when, _, step = heapq.heappop(timers)
            if step.is_cancelled:
                continue
            if when > self._moment:
                self._moment = when
                self._steps_before_moment = self.steps
            self._ready.append(step)
            while timers and timers[0][0] <= self._moment:
                step = heapq.heappop(timers)[2]
                if not step.is_cancelled:
                    self._ready.append(step)
