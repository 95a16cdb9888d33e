"""The events of a story: counted, described, and boiled down to one number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class Diary:
    """The steps of a story that have an effect, in their order."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        """`tell` gets a line for each."""
        self.happened: Counter[str] = Counter()
        """How often what happened."""
        self.schedule = 0
        """Stands for the order of all effects: stories with equal numbers differ in nothing."""
        self.clock: Callable[[], float] = lambda: 0.0
        self._tell = tell

    def note(self, what: str, which: str = "") -> None:
        """Note what a user did who is not part of kvplace."""
        self.count(what)
        self.step("", f"{what} {which}")

    def count(self, what: str) -> None:
        """Count what is not a step: a fault changes nothing by itself."""
        self.happened[what] += 1

    def step(self, process: str, what: str) -> None:
        """Note what a process did."""
        self.schedule = hash((self.schedule, process, what))
        if self._tell is not None:
            self._tell(f"{self.clock():9.3f} {process:3} {what}")
