"""Knows when repairs are of no use, since something else undoes them each time.

To go on fighting would use a CPU for nothing and move a VM's threads every second. So after MOST_REPAIRS
within a period there is one try in each period, until a repair has lasted for one.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_REPAIRS = 5
"""With so many repairs within PERIOD_S the agent gives up."""
PERIOD_S = 60.0


@dataclass(frozen=True, slots=True)
class RepairHistory:
    """The repairs of one thing within the last period; times are seconds of a monotonic clock."""

    repairs: tuple[float, ...] = ()
    """When they were made."""
    given_up: bool = False

    def may_repair(self, now: float) -> bool:
        """Whether drift is to be repaired now."""
        return not self.given_up or now - self.repairs[-1] >= PERIOD_S

    def repaired(self, now: float) -> RepairHistory:
        """Take a repair into account."""
        recent = (*(moment for moment in self.repairs if now - moment < PERIOD_S), now)
        return RepairHistory(recent, self.given_up or len(recent) >= MOST_REPAIRS)

    def intact(self, now: float) -> RepairHistory:
        """Take into account that nothing differs."""
        if self.repairs and now - self.repairs[-1] >= PERIOD_S:
            return RepairHistory()
        return self
