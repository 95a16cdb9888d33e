"""Asks before a rollout, and shows its run: bars on a terminal, else a line a second, both on stderr.

Ctrl-C stops the run cleanly: every call gets its answer, and the report shows the progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable

import click

from kvplace.cli.live_cluster import on_interrupt
from kvplace.cli.output import say
from kvplace.core.quantity import counted
from kvplace.core.vm_stages import VmStage
from kvplace.rollout.report import Counts, Report
from kvplace.rollout.run import RolloutRun

_LINE_S = 1.0
_BARS_S = 0.1
_STALL_S = 30.0


def ask(question: str) -> None:
    """Ask for a yes; raises Abort without one, and on Ctrl-C."""
    with on_interrupt(None):
        click.confirm(question, abort=True, err=True)


async def shown_run(run: RolloutRun) -> Report:
    """Carry out a run and show how far it is; the first Ctrl-C stops it, the second one ends the program."""

    def stop() -> None:
        say("stopping; created VMs stay")
        run.stop()

    with on_interrupt(stop):
        async with _bars(run) if sys.stderr.isatty() else _lines(run), _stalls(run):
            return await run.run()


def told_what_is_left(clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """Return a function that reports how many VMs are still to be deleted, once a second."""
    next_line = clock() + _LINE_S

    def tell(left: int, of: int) -> None:
        nonlocal next_line
        if clock() >= next_line:
            next_line = clock() + _LINE_S
            say(f"{left} of {counted(of, 'VM')} left" if left else "the VMs are gone; their pods end")

    return tell


@contextlib.asynccontextmanager
async def _stalls(run: RolloutRun) -> AsyncIterator[None]:
    """State the reason of the wait once whenever nothing has changed for a while."""

    async def watch() -> None:
        before: Counts | None = None
        same_for, told = 0.0, False
        while True:
            await asyncio.sleep(_LINE_S)
            counts = run.counts
            same_for, told = (same_for + _LINE_S, told) if counts == before else (0.0, False)
            before = counts
            if same_for >= _STALL_S and not told and run.waits_for:
                told = True
                say(
                    f"nothing has changed for {_STALL_S:.0f} s: {run.waits_for}; Ctrl-C leaves them as they "
                    "are, and `kvplace rollout resume` continues"
                )

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@contextlib.asynccontextmanager
async def _lines(run: RolloutRun) -> AsyncIterator[None]:
    async def print_lines() -> None:
        before: Counts | None = None
        while True:
            await asyncio.sleep(_LINE_S)
            counts = run.counts
            if counts != before:
                say(counts.sentence)
            before = counts

    printing = asyncio.create_task(print_lines())
    try:
        yield
    finally:
        printing.cancel()
        await asyncio.gather(printing, return_exceptions=True)
        say(run.counts.sentence)


@contextlib.asynccontextmanager
async def _bars(run: RolloutRun) -> AsyncIterator[None]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvplace.cli.output import console

    columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(sys.stderr, 80)) as progress:
        wanted = run.counts.wanted
        bars = {stage: progress.add_task(stage.value, total=wanted) for stage in VmStage}
        failed = progress.add_task("failed", total=wanted, visible=False)

        def draw() -> None:
            counts = run.counts
            for stage, bar in bars.items():
                progress.update(bar, completed=counts.reached[stage])
            progress.update(failed, completed=counts.failed, visible=counts.failed > 0)

        async def redraw() -> None:
            while True:
                draw()
                await asyncio.sleep(_BARS_S)

        drawing = asyncio.create_task(redraw())
        try:
            yield
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)
            draw()
