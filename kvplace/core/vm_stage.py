"""How far a VM has come on its way to its own cores."""

from __future__ import annotations

from enum import Enum


class VmStage(Enum):
    """Where a VM is; a later stage includes those before it."""

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
