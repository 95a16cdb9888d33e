"""Which events are new: a pod that is retried every second is not told the same every second."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

_REMEMBERED = 10_000


class News:
    """Remembers what was said, for a while."""

    def __init__(self, *, seconds: float = 300.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._said: OrderedDict[Hashable, float] = OrderedDict()

    def is_new(self, what: Hashable) -> bool:
        """Say whether this was not said lately, and remember it as said."""
        now = self._clock()
        said = self._said.get(what)
        if said is not None and now - said < self._seconds:
            return False
        self._said[what] = now
        self._said.move_to_end(what)
        if len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)
        return True
