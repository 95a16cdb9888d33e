"""The steps that a long computation may take before other work on the event loop has its turn.

Steps are counted and not timed, so that equal histories take equal turns. `kube/concurrency.py` runs the
computations, turn by turn.
"""

from __future__ import annotations

STEPS_OF_A_TURN = 2_000
"""Steps of about a microsecond each."""


class TurnIsOver(Exception):
    """Other work must have its turn."""


class StepBudget:
    """The steps that are left of a turn."""

    def __init__(self, steps: float | None = None) -> None:
        self._left = STEPS_OF_A_TURN if steps is None else steps

    def spend(self, steps: int) -> None:
        """Begin a work of so many steps; raises TurnIsOver before it when none are left."""
        if self._left <= 0:
            raise TurnIsOver
        self._left -= steps


UNLIMITED = StepBudget(float("inf"))
"""The budget of callers off the event loop."""
