"""Checks and their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from kvplace.doctor.installation import Installation


class Level(Enum):
    """The severity of a finding."""

    WRONG = "wrong"
    """Something does not work, or will not work for the next VM."""
    WARNING = "warning"
    """It works, but needs attention."""
    UNCHECKED = "unchecked"
    """It could not be checked."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault."""

    level: Level
    about: str
    """The object, `Kind name`."""
    problem: str
    """One sentence."""
    fix: str
    """The action, in the imperative."""


Checking = Callable[[Installation], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """One group of related checks."""

    name: str
    needs: tuple[str, ...]
    """The resources that must have been read for it."""
    run: Checking
    before: bool = False
    """Whether it also applies to a cluster without kvplace."""


def wrong(about: str, problem: str, fix: str) -> Finding:
    """Make a finding about something that does not work."""
    return Finding(Level.WRONG, about, problem, fix)


def warning(about: str, problem: str, fix: str) -> Finding:
    """Make a finding about something that needs attention."""
    return Finding(Level.WARNING, about, problem, fix)


def some(names: Iterable[str], most: int = 3) -> str:
    """Name the first of many."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
