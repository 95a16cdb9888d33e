"""Several reads at the same time, of which none outlives the others.

`asyncio.gather` leaves the others running when one fails. Their connections are closed under them a moment
later, and nobody catches what they raise then: a person would see it as a traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import gather as together  # its types say what each awaitable gives
else:

    async def together(*awaitables: Awaitable[Any]) -> list[Any]:
        """Await all at the same time and return what they give; when one fails the others are given up."""
        tasks = [asyncio.ensure_future(each) for each in awaitables]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


__all__ = ["together"]
