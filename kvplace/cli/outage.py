"""Reports in one sentence that the API server is unavailable while commands watch it.

Each watch logs each failed attempt. That is right for a service; a person needs to know it once, and again
when it lasts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from kvplace.cli.output import say
from kvplace.core.errors import KvplaceError
from kvplace.kube import list_watch
from kvplace.kube.api_errors import Expired

REPEATED_S = 60.0
"""How long nothing more is reported of an outage."""


class OneSentence(logging.Handler):
    """Takes the log lines of all watches, and passes on the first of an outage."""

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`server` is the API server's URL."""
        super().__init__(logging.WARNING)
        self._server = server
        self._clock = clock
        self._said_at = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        """State why a watch was interrupted, unless that has been reported a moment ago."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        failure = next((value for value in arguments if isinstance(value, KvplaceError)), None)
        if isinstance(failure, Expired) or self._clock() - self._said_at < REPEATED_S:
            return
        self._said_at = self._clock()
        why = failure if failure is not None else record.getMessage()
        say(f"{self._server} cannot be watched at the moment ({why}); trying again until it can")


@contextlib.contextmanager
def outages_in_one_sentence(server: str) -> Iterator[None]:
    """Report it of the watches that run in the block, instead of what they log."""
    logger = logging.getLogger(list_watch.__name__)
    handler, propagates = OneSentence(server), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)
