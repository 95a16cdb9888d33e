"""Progress of a long command on stderr, and Ctrl-C that ends it with the result so far.

A bar on a terminal, else a line every few seconds; nothing for a command that is done at once. The working
code calls `show` at each next piece, and ends early when the answer is False. The second Ctrl-C ends the
command at once, without an answer.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from kvplace.cli.output import say

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

QUIET_S = 1.0
"""A shorter command shows nothing."""
_BAR_INTERVAL_S = 0.1
_LINE_INTERVAL_S = 3.0


class Progress:
    """Shows progress and watches for Ctrl-C while its block runs."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        """`what` names the work on `total` pieces; each piece is a `unit`."""
        self._what = what
        self._total = total
        self._unit = unit
        self._began = time.monotonic()
        self._next = self._began + QUIET_S
        self._bar: tuple[Bar, TaskID] | None = None
        self._before: signal._HANDLER = None
        self.interrupted = False

    def __enter__(self) -> Self:
        # If SIGINT is ignored, as in background jobs of a script, it stays ignored.
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._bar is not None:
            self._bar[0].stop()

    def show(self, done: int, now: str = "") -> bool:
        """Show the number of done pieces, and the present stage; False once the command is to end."""
        if not self.interrupted and time.monotonic() >= self._next:
            if sys.stderr.isatty():
                self._draw(done, now)
            else:
                stage = f" ({now})" if now else ""
                say(f"{self._what}{stage}: {done} of {self._total} {self._unit}s")
                self._next = time.monotonic() + _LINE_INTERVAL_S
        return not self.interrupted

    def _draw(self, done: int, now: str) -> None:
        if self._bar is None:
            self._bar = _bar(self._what, self._total, self._unit)
        bar, task = self._bar
        bar.update(task, completed=done, now=now)
        self._next = time.monotonic() + _BAR_INTERVAL_S

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._bar is not None:
            self._bar[0].stop()
        say("interrupted; the answer so far follows (Ctrl-C again: no answer)")


def _bar(what: str, total: int, unit: str) -> tuple[Bar, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn(f"{unit}s"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
        console=Console(stderr=True),
        transient=True,
    )
    bar.start()
    return bar, bar.add_task(what, total=total, now="")
