"""The bound on the work of a search for moves.

Work is counted in steps, not in seconds, so that equal input gets the same answer on every machine. A step
is one check of one target by counts, about 5 µs; asking for a placement costs more of them.
"""

from __future__ import annotations

from collections.abc import Callable

Watch = Callable[[int], bool]
"""Called with the steps that a search has taken; returns whether it goes on."""

MAX_STEPS = 1_000_000
"""Steps for each number of moves: a few seconds in the worst case."""
MAX_STEPS_THOROUGH = 100 * MAX_STEPS
"""Steps for each number of moves where the user asks for a thorough search: minutes in the worst case."""

LOOK = 10
"""Steps of comparing what VMs need with what is free in their targets."""
LOOKUP = 50
"""Steps of asking for a placement."""
PLACEMENT = 200
"""Steps of computing a placement that is not cached, in addition to `LOOKUP`."""

_STEPS_BETWEEN_LOOKS = 20_000
"""A watch is asked again after so many steps: a tenth of a second."""


def unwatched(_steps: int) -> bool:
    """Let a search go on to its end."""
    return True


class Budget:
    """The steps of a search: allowed and taken."""

    def __init__(self, limit: int, watch: Watch = unwatched) -> None:
        self.limit = limit
        self._watch = watch
        self._next_look = _STEPS_BETWEEN_LOOKS
        self.used = 0
        self.total = 0
        """All steps, also those before the last `renew`."""
        self.was_exceeded = False
        """Whether the search left something out because no steps were left, or because it was stopped."""
        self.was_stopped = False
        """Whether the watch reported that the search ends."""

    def spend(self, steps: int) -> None:
        """Count some steps."""
        self.used += steps
        self.total += steps

    def renew(self) -> None:
        """Start again with no steps used."""
        self.used = 0

    def exceeded(self, share: int = 1) -> bool:
        """Report whether the steps, or one of so many equal shares of them, are used up: the search stops."""
        if self.total >= self._next_look and not self.was_stopped:
            self._next_look = self.total + _STEPS_BETWEEN_LOOKS
            self.was_stopped = not self._watch(self.total)
        if self.used * share <= self.limit and not self.was_stopped:
            return False
        self.was_exceeded = True
        return True
