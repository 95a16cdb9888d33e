"""The bound on the work of a search for moves.

Work is counted in steps, not in seconds, so that equal input gets the same answer on every machine. A step
is one look at one target by counts, about 5 µs; asking for a placement costs more of them.
"""

from __future__ import annotations

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


class Budget:
    """The steps that a search may take, and those that it has taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.total = 0
        """All steps, also those before the last `renew`."""
        self.was_exceeded = False
        """Whether the search left something out because no steps were left."""

    def spend(self, steps: int) -> None:
        """Count some steps."""
        self.used += steps
        self.total += steps

    def renew(self) -> None:
        """Start again with no steps used."""
        self.used = 0

    def exceeded(self, share: int = 1) -> bool:
        """Report whether the steps, or one of so many equal shares of them, are used up: the search stops."""
        if self.used * share <= self.limit:
            return False
        self.was_exceeded = True
        return True
