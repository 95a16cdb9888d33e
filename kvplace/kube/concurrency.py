"""Work on one event loop: calls at the same time, and long computations in turns.

**Calls.** `asyncio.gather` leaves the others running when one fails. Their connections may be closed under
them a moment later, and nothing catches their errors then: a person would see a traceback. And work
that is taken for ended may be begun a second time beside them. So none of several calls outlives the others.

**Turns.** Bind, admission and health never wait for a computation over thousands of nodes. It spends the
steps of a budget (`core/search_budget.py`), and other work has its turn when the budget is spent. Three forms
of work have the same budget:

* `in_turns`: a function that decides on one state of the cluster. It begins again in each turn, and finds in
  its caches the results of the turns before;
* `Turns.spend` and `Turns.drain`: a loop over many items, which may change between two of them;
* `Turns.finish`: a search of `core` that pauses after each placement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from kvplace.core.errors import KvplaceError
from kvplace.core.search_budget import TurnBudget, TurnIsOver

K = TypeVar("K")
T = TypeVar("T")

_SEARCH_STEPS = 2_000
"""Steps between two pauses of a search: it places a VM, which takes milliseconds on a large machine."""

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


async def in_turns(compute: Callable[[TurnBudget], T]) -> T:
    """Compute in turns; each turn begins again, and nothing else runs between the last one and the return."""
    while True:
        try:
            return compute(TurnBudget())
        except TurnIsOver:
            await next_turn()


async def next_turn() -> None:
    """Give other work its turn."""
    await asyncio.sleep(0)


class Turns:
    """The turns of one long work that awaits."""

    def __init__(self) -> None:
        self._budget = TurnBudget()

    async def spend(self, steps: int) -> None:
        """Begin a work of so many steps, in the next turn when none are left of this one."""
        try:
            self._budget.spend(steps)
        except TurnIsOver:
            await next_turn()
            self._budget = TurnBudget()
            self._budget.spend(steps)

    async def drain(self, waiting: dict[K, None], work: Callable[[K], None], steps: int) -> None:
        """Do a work of so many steps for each key until none waits; the last key comes first."""
        while waiting:
            key, _ = waiting.popitem()
            work(key)
            await self.spend(steps)

    async def finish(self, search: Generator[None, None, T]) -> T:
        """Carry out a search to its end; it pauses at each `yield`."""
        while True:
            try:
                next(search)
            except StopIteration as ended:
                answer: T = ended.value
                return answer
            await self.spend(_SEARCH_STEPS)


__all__ = ["Turns", "all_ended", "in_turns", "next_turn", "together"]
