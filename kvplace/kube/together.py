"""Several calls at the same time; none outlives the others.

`asyncio.gather` leaves the others running when one fails. Their connections may be closed under them a moment
later, and nothing catches what they raise then: a person would see it as a traceback. And work that is taken
for ended may be begun a second time beside them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from kvplace.core.errors import KvplaceError

if TYPE_CHECKING:
    from asyncio import gather as all_ended  # its types state what each awaitable gives
    from asyncio import gather as together
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

    async def all_ended(*awaitables: Awaitable[Any]) -> list[Any]:
        """Await all at the same time to their end and return what they give, or raise then what one raises.

        For writes that are followed by more work. A mistake of ours is raised before all others.
        """
        given = await asyncio.gather(*awaitables, return_exceptions=True)
        errors = [one for one in given if isinstance(one, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, KvplaceError))
        return given


__all__ = ["all_ended", "together"]
