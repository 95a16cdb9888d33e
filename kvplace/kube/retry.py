"""How long to wait before another try, and which errors deserve one.

Pauses grow exponentially with full jitter: a random part of the ceiling, so that many clients that failed
together do not come back together. A pause that the server asks for is the least that is waited.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from kvplace.core.errors import Conflict, KvplaceError, Unavailable
from kvplace.kube.api_errors import ApiUnavailable

WORTH_ANOTHER_TRY: tuple[type[KvplaceError], ...] = (Unavailable, Conflict)
"""The only branches of core's tree of errors that another try can mend."""


class Backoff:
    """Growing pauses with full jitter."""

    def __init__(
        self, *, first_s: float = 0.2, longest_s: float = 30.0, chance: Callable[[], float] = random.random
    ) -> None:
        """`chance` answers a number from 0 up to 1, as random.random does."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._chance = chance
        self._failures = 0

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._failures = 0

    def next_pause(self, error: BaseException | None = None) -> float:
        """Count one more failure and answer the seconds to wait after it."""
        pause = self.pause_after(self._failures, error)
        self._failures += 1
        return pause

    def pause_after(self, failures: int, error: BaseException | None = None) -> float:
        """Answer the seconds to wait after that many earlier failures."""
        ceiling: float = min(self._first_s * 2 ** min(failures, 30), self._longest_s)
        asked = error.retry_after if isinstance(error, ApiUnavailable) else None
        return (asked or 0.0) + self._chance() * ceiling


def persistently(
    *,
    attempts: int,
    backoff: Backoff | None = None,
    retried: Callable[[KvplaceError], bool] = lambda _: True,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncRetrying:
    """Make a tenacity policy that tries again after Unavailable and Conflict, and after nothing else.

    `retried` can narrow that down. The last error is raised as it is.
    """
    waits = backoff or Backoff(longest_s=5.0)

    def worth(error: BaseException) -> bool:
        return isinstance(error, WORTH_ANOTHER_TRY) and retried(error)

    def pause(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return waits.pause_after(state.attempt_number - 1, error)

    return AsyncRetrying(
        retry=retry_if_exception(worth),
        stop=stop_after_attempt(attempts),
        wait=pause,
        sleep=sleep,
        reraise=True,
    )
