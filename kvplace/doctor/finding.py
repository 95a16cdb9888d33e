"""What a check finds, and what it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from kvplace.doctor.installation import Installation


class Level(Enum):
    """How bad a finding is."""

    WRONG = "wrong"
    """Something does not work, or will not for the next VM."""
    WARNING = "warning"
    """It works, and somebody should look at it."""
    UNCHECKED = "unchecked"
    """It could not be looked at."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is missing or wrong."""

    level: Level
    about: str
    """The object, `Kind name`."""
    problem: str
    """One sentence."""
    fix: str
    """What to do, as an order."""


Checking = Callable[[Installation], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """One group of things that belong together."""

    name: str
    needs: tuple[str, ...]
    """The resources that must have been read for it."""
    run: Checking
    before: bool = False
    """Whether it says something about a cluster without kvplace, too."""


def wrong(about: str, problem: str, fix: str) -> Finding:
    """Report what does not work."""
    return Finding(Level.WRONG, about, problem, fix)


def warning(about: str, problem: str, fix: str) -> Finding:
    """Report what somebody should look at."""
    return Finding(Level.WARNING, about, problem, fix)


def some(names: Iterable[str], most: int = 3) -> str:
    """Name the first of many."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
