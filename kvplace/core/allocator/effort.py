"""Bounds on searching, counted in steps.

Several parts of a placement are NP-hard on machines of odd shape: the nearest of many NUMA nodes (densest
subgraph), the fewest L3 groups or sockets (set cover). Every such search takes its steps from an `Effort`.
When none are left it stops, and the best answer found so far counts. Steps, unlike seconds, are the same on
every computer: equal questions get equal answers everywhere.
"""

from __future__ import annotations


class Effort:
    """Steps that the searches of one question may still take."""

    __slots__ = ("_left",)

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int = 1) -> None:
        """Take steps; the last ones may exceed what is left."""
        self._left -= steps

    @property
    def is_spent(self) -> bool:
        """Whether every search must stop."""
        return self._left <= 0
