"""How often others have their turn while something long is computed: counts depend on no clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def with_turns(work: Coroutine[Any, Any, T], turn: Callable[[], None] = lambda: None) -> tuple[T, int]:
    """Return what the work gives, and how many turns others had beside it; each of them calls `turn`."""
    turns = 0
    task = asyncio.create_task(work)
    while not task.done():
        await asyncio.sleep(0)
        turn()
        turns += 1
    return await task, turns
