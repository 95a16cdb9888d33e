"""Long computations in slices, so that bind, admission and health never wait for them.

A slice ends after so many steps, which are counted and not timed, so that equal histories take equal turns.
The computation is begun again after each slice and finds what it has done already in its caches; so it sees
every change that came between two slices, and its last slice decides on one state of the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_STEPS = 2_000
"""Steps of about a microsecond each."""


class SliceIsOver(Exception):
    """Others are to have their turn."""


class Slice:
    """The steps that are left until others have their turn."""

    def __init__(self, steps: float = _STEPS) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Begin a work of so many steps; raises SliceIsOver before it when none are left."""
        if self._left <= 0:
            raise SliceIsOver
        self._left -= steps


ENDLESS = Slice(float("inf"))
"""No limit, for callers off the event loop."""


async def in_slices(compute: Callable[[Slice], T]) -> T:
    """Compute slice by slice; nothing else runs between the last of them and the return."""
    while True:
        try:
            return compute(Slice())
        except SliceIsOver:
            await asyncio.sleep(0)
