"""Conditions: what a component says about an object in its status, for people and for `kubectl wait`."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MESSAGE = 4096
"""Longer messages are cut."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, after the API conventions of Kubernetes; the positive state is always True."""

    type: str
    status: bool | None
    """None is written as Unknown."""
    reason: str
    """One CamelCase word for machines."""
    message: str
    """One sentence for people."""

    @property
    def written_status(self) -> str:
        """The status as the API spells it."""
        return "Unknown" if self.status is None else str(self.status)

    def document(self, changed_at: str | None) -> dict[str, str]:
        """Write it as JSON; `changed_at` is when its status last changed, None leaves a stored time."""
        written = {
            "type": self.type,
            "status": self.written_status,
            "reason": self.reason,
            "message": self.message[:MAX_MESSAGE],
        }
        return written if changed_at is None else {**written, "lastTransitionTime": changed_at}
