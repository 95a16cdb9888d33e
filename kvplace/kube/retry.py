"""When a call is tried again: one policy for every component, on tenacity.

    Conflict         at once: the caller reads the new state first
    Unavailable      after a pause; at least the server's Retry-After
    anything else    never

Pauses grow exponentially with full jitter: each is a random part of its ceiling, so that clients that failed
together do not come back together.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from prometheus_client import Counter
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from kvplace.core.errors import Conflict, KvplaceError, Unavailable
from kvplace.kube.api_errors import ApiUnavailable

P = ParamSpec("P")
T = TypeVar("T")

RETRIES = Counter(
    "kvplace_api_retries_total",
    "Calls that were tried again, after a conflict or because the API server was unavailable.",
    ["cause"],
)


class Retrying(Protocol):
    """The policy of one call."""

    async def __call__(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **others: P.kwargs) -> T:
        """Call the function until it succeeds or is to be tried no more; returns its answer."""
        ...


@dataclass(frozen=True)
class Backoff:
    """How long the pauses are."""

    first_s: float = 0.2
    """Ceiling of the first pause; it doubles with each failure."""
    longest_s: float = 30.0
    jitter: Callable[[], float] = random.random
    """Returns a number from 0 up to 1."""

    def pause(self, failures: int, error: BaseException | None = None) -> float:
        """Return the seconds to wait after an error that so many failures came before."""
        ceiling: float = min(self.first_s * 2 ** min(failures, 30), self.longest_s)
        asked = error.retry_after if isinstance(error, ApiUnavailable) else None
        return (asked or 0.0) + self.jitter() * ceiling


def is_retried(error: BaseException) -> bool:
    """Return whether another try may end better."""
    return isinstance(error, Conflict | Unavailable)


def retrying(
    *,
    attempts: int | None = None,
    deadline: float | None = None,
    backoff: Backoff | None = None,
    retried: Callable[[KvplaceError], bool] = is_retried,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Retrying:
    """Make the policy of one call.

    Used as `await retrying(attempts=3)(function, argument)`. Ends after so many `attempts`, or when the next
    one would begin after `deadline`, a time of the running loop. `retried` can narrow down what is tried
    again. The last error is raised as it is.

    tenacity comes in with the first failure, which it gets as its first attempt: it costs 50 µs a call, and
    nearly all calls succeed.
    """
    backoff = backoff or Backoff(longest_s=5.0)

    def retry(error: BaseException) -> bool:
        return isinstance(error, KvplaceError) and is_retried(error) and retried(error)

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return 0.0 if isinstance(error, Conflict) else backoff.pause(state.attempt_number - 1, error)

    def stop(state: RetryCallState) -> bool:
        if attempts is not None and state.attempt_number >= attempts:
            return True
        return deadline is not None and asyncio.get_running_loop().time() + state.upcoming_sleep > deadline

    def count(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        RETRIES.labels("conflict" if isinstance(error, Conflict) else "unavailable").inc()

    async def call(function: Callable[P, Awaitable[T]], /, *args: P.args, **others: P.kwargs) -> T:
        try:
            return await function(*args, **others)
        except KvplaceError as error:
            if not retry(error):
                raise
            first: KvplaceError | None = error

        async def attempt() -> T:
            nonlocal first
            if first is not None:
                failed, first = first, None
                raise failed
            return await function(*args, **others)

        policy = AsyncRetrying(
            retry=retry_if_exception(retry),
            stop=stop,
            wait=wait,
            sleep=sleep,
            before_sleep=count,
            reraise=True,
        )
        return await policy(attempt)

    return call
