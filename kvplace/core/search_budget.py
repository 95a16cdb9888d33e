"""Bounds on the work of a computation, counted in steps.

Steps, unlike seconds, are the same on every computer: equal questions get equal answers everywhere, and equal
histories take equal turns. Three kinds of work have a budget:

* a search of the allocator (`SearchBudget`): several parts of a placement are NP-hard on machines of odd
  shape, such as the nearest of many NUMA nodes (densest subgraph) and the fewest L3 groups or sockets (set
  cover). Without a step left the best answer found so far counts.
* a search for moves (`WatchedBudget`), which its caller may also stop.
* a long computation on the event loop (`TurnBudget`): other work then has its turn. `kube/concurrency.py`
  runs these, turn by turn.
"""

from __future__ import annotations

from collections.abc import Callable

STEPS_OF_A_TURN = 2_000
"""Steps of about a microsecond each."""


class TurnIsOver(Exception):
    """Other work must have its turn."""


class TurnBudget:
    """The steps that are left of a turn."""

    def __init__(self, steps: float | None = None) -> None:
        self._left = STEPS_OF_A_TURN if steps is None else steps

    def spend(self, steps: int) -> None:
        """Begin a work of so many steps; raises TurnIsOver before it when none are left."""
        if self._left <= 0:
            raise TurnIsOver
        self._left -= steps


UNLIMITED = TurnBudget(float("inf"))
"""The budget of callers off the event loop."""


class SearchBudget:
    """Steps that the searches of one question may still take."""

    __slots__ = ("_left",)

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int = 1) -> None:
        """Take steps; the last call may exceed the budget."""
        self._left -= steps

    @property
    def is_spent(self) -> bool:
        """Whether every search must stop."""
        return self._left <= 0


Watch = Callable[[int], bool]
"""Called with the progress of a search, in its steps or moves; returns whether it continues."""

MAX_STEPS = 1_000_000
"""Steps for each number of moves: a few seconds in the worst case."""
MAX_STEPS_THOROUGH = 100 * MAX_STEPS
"""Steps for each number of moves where the user asks for a thorough search: minutes in the worst case."""

LOOK = 10
"""Steps of comparing VMs with the free resources of their targets."""
LOOKUP = 50
"""Steps of asking for a placement."""
PLACEMENT = 200
"""Steps of computing a placement that is not cached, in addition to `LOOKUP`."""

_STEPS_BETWEEN_LOOKS = 20_000
"""A watch is asked again after so many steps: a tenth of a second."""


def unwatched(_steps: int) -> bool:
    """Let a search run to its end."""
    return True


class WatchedBudget:
    """The steps of a search: allowed and taken."""

    def __init__(self, limit: int, watch: Watch = unwatched) -> None:
        self.limit = limit
        self._watch = watch
        self._next_look = _STEPS_BETWEEN_LOOKS
        self.used = 0
        self.total = 0
        """All steps, also before the last `renew`."""
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

    def exceeded(self) -> bool:
        """Whether the steps are used up, or the watch ends the search."""
        if self.total >= self._next_look and not self.was_stopped:
            self._next_look = self.total + _STEPS_BETWEEN_LOOKS
            self.was_stopped = not self._watch(self.total)
        if self.used <= self.limit and not self.was_stopped:
            return False
        self.was_exceeded = True
        return True
