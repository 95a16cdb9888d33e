"""Which call gets which fault: rules by verb, resource and the how many-th such call it is.

Verbs and resources are named as in RBAC (`create pods/binding`). One more verb, `event`, stands for a line of
an open watch, so that a watch can fail at a certain event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from harness.waiting import PATIENCE_S

EVENT = "event"
ALL = 1 << 30
"""For a rule that holds for every call while it is played."""


@dataclass(frozen=True, slots=True)
class Before:
    """Do something instead of forwarding the call, and cut the connection."""

    action: Callable[[], None]


@dataclass(frozen=True, slots=True)
class After:
    """Forward the call, do something when it has been carried out, and cut the connection."""

    action: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut the connection; the API server never hears of the call."""


@dataclass(frozen=True, slots=True)
class DropAnswer:
    """Forward the call and cut the connection when it has been carried out."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Forward the call, or pass the event on, some seconds later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer with an error in the API server's place."""

    status: int
    reason: str
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class OldVersion:
    """Make the caller's resource version an old one; the API server itself answers 409 or 410 then."""


@dataclass(frozen=True, slots=True)
class SlowBody:
    """Send the answer in small pieces."""

    pieces: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class TornLine:
    """End a watch in the middle of an event's line."""


@dataclass(frozen=True, slots=True)
class ExpiredStream:
    """Send an ERROR with code 410 in place of an event, and end the watch."""


Fault: TypeAlias = (
    Before | After | Cut | DropAnswer | Delay | Answer | OldVersion | SlowBody | TornLine | ExpiredStream
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One fault, for the `nth` call that matches and the `times` - 1 after it."""

    verb: str
    """"*" matches every call, but no event."""
    resource: str
    """With its subresource; "*" matches all."""
    fault: Fault
    nth: int = 1
    times: int = 1

    def matches(self, verb: str, resource: str) -> bool:
        """Return whether this rule counts a call or an event."""
        right_verb = self.verb == verb or (self.verb == "*" and verb != EVENT)
        return right_verb and self.resource in ("*", resource)

    def __str__(self) -> str:
        return f"{type(self.fault).__name__} at {self.verb} {self.resource} {self.nth}"


@dataclass
class _Played:
    rule: Rule
    seen: int = 0
    fired: int = 0


@dataclass
class Script:
    """The rules that are played now, and which of them have come true; for any number of threads."""

    _played: list[_Played] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    last_fault_at: float = 0.0
    """Time of the monotonic clock when the last fault began or, where it takes time, ended."""

    def play(self, rules: Iterable[Rule]) -> None:
        """Play these rules and no others; counting begins anew."""
        with self._changed:
            self._played = [_Played(rule) for rule in rules]

    def next_fault(self, verb: str, resource: str) -> Fault | None:
        """Count a call, or an event, and return its fault; of several rules the first one counts."""
        found: Fault | None = None
        with self._changed:
            for one in self._played:
                if not one.rule.matches(verb, resource):
                    continue
                one.seen += 1
                if found is None and one.rule.nth <= one.seen < one.rule.nth + one.rule.times:
                    one.fired += 1
                    found = one.rule.fault
            if found is not None:
                self._note()
        return found

    def fault_ended(self) -> None:
        """Note that a fault which took time has ended now."""
        with self._changed:
            self._note()

    def wait_until_played(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until every rule has come true once; raises TimeoutError that names the others."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(one.fired for one in self._played), timeout_s):
                left = ", ".join(str(one.rule) for one in self._played if not one.fired)
                raise TimeoutError(f"these faults did not come: {left}")

    def _note(self) -> None:
        self.last_fault_at = time.monotonic()
        self._changed.notify_all()
