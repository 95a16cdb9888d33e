"""Conditions: reports of a component in an object's status, for people and for `kubectl wait`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

OUR_PREFIX = "kvplace.io/"
"""How the types of our conditions begin on objects that others write conditions on, too."""
MAX_MESSAGE = 4096
"""Longer messages are cut."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, after the API conventions of Kubernetes; the good state is always True."""

    type: str
    status: bool | None
    """None is Unknown."""
    reason: str
    """One CamelCase word for machines."""
    message: str
    """One sentence for people."""

    @classmethod
    def read(cls, kind: str, status: str, reason: str, message: str) -> Condition:
        """Read a condition as the API spells it; a status that is neither True nor False is Unknown."""
        return cls(kind, {"True": True, "False": False}.get(status), reason, message)

    def document(self, changed: datetime | None) -> dict[str, str]:
        """Write it as JSON; `changed` is when its status last did, None leaves the stored moment."""
        written = {
            "type": self.type,
            "status": "Unknown" if self.status is None else str(self.status),
            "reason": self.reason,
            "message": self.message[:MAX_MESSAGE],
        }
        return written if changed is None else {**written, "lastTransitionTime": write_time(changed)}


def write_time(moment: datetime) -> str:
    """Write a moment in UTC as the API does."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
