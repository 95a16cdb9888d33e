"""How far a VM has come on its way to its own cores, and how long VMs take to come there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class VmStage(Enum):
    """The progress of a VM; a later stage includes the earlier ones."""

    CREATED = "created"
    """Its object is stored."""
    BOUND = "bound"
    """Its pod has a node, and with it cores."""
    RUNNING = "running"
    """Its guest runs."""
    PINNED = "pinned"
    """The node's agent has read back that every thread is where it belongs."""

    @property
    def rank(self) -> int:
        """Count the stages before this one."""
        return _ORDER.index(self)

    def includes(self, other: VmStage) -> bool:
        """Return whether a VM at this stage has reached the other one."""
        return self.rank >= other.rank


_ORDER = tuple(VmStage)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """How long something took, in seconds."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Percentiles:
        """Take the percentiles of measurements; all 0 without any."""
        ordered = sorted(seconds)
        count = len(ordered)
        if not count:
            return cls()
        p50, p95, p99 = (ordered[count * percent // 100] for percent in (50, 95, 99))
        return cls(p50, p95, p99, ordered[-1])
