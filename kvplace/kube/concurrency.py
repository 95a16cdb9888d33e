"""Work on one event loop: calls at the same time, and long computations in turns.

**Calls.** `asyncio.gather` leaves the others running when one fails. Their connections may be closed under
them a moment later, and nothing catches their errors then: a person would see a traceback. And work
that is taken for ended may be begun a second time beside them. So none of several calls outlives the others.

**Turns.** Bind, admission and health never wait for a computation over thousands of nodes. It spends the
steps of a budget (`core/search_budget.py`), and other work has its turn when the budget is spent. A loop
awaits `Turns.spend` for each item, and the items may change meanwhile. Where all of an answer must be
true at one moment, `Turns.decide` calls a function again in each turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kvplace.core.errors import KvplaceError
from kvplace.core.search_budget import TurnBudget, TurnIsOver

T = TypeVar("T")

if TYPE_CHECKING:
    from asyncio import gather as all_ended  # its types state the result of each awaitable
    from asyncio import gather as together
else:

    async def together(*awaitables: Awaitable[Any]) -> list[Any]:
        """Await all at the same time and return their results; when one fails, the others are cancelled."""
        tasks = [asyncio.ensure_future(each) for each in awaitables]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def all_ended(*awaitables: Awaitable[Any]) -> list[Any]:
        """Await all at the same time to their end; return their results, or raise the error of one.

        For writes that are followed by more work. A mistake of ours is raised before all others.
        """
        given = await asyncio.gather(*awaitables, return_exceptions=True)
        errors = [one for one in given if isinstance(one, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, KvplaceError))
        return given


class Turns:
    """The turns of one long work."""

    def __init__(self) -> None:
        self._budget = TurnBudget()

    async def spend(self, steps: int) -> None:
        """Begin a work of so many steps, in the next turn when none are left of this one."""
        await self.decide(lambda budget: budget.spend(steps))

    async def decide(self, compute: Callable[[TurnBudget], T]) -> T:
        """Compute on one state: nothing else runs between the last turn and the return.

        Each turn begins again, and must find in caches what the turns before have computed.
        """
        while True:
            try:
                return compute(self._budget)
            except TurnIsOver:
                await asyncio.sleep(0)
                self._budget = TurnBudget()


__all__ = ["Turns", "all_ended", "together"]
