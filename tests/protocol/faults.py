"""The faults in a story, and their rates: drawn from its seed, so that stories differ in kind, too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

PAUSES_S = (0.0, 0.0, 0.001, 0.01, 0.05, 0.3)
SLOW_S = (1.0, 2.0, 5.0)
LATE_S = 20.0
"""A request takes effect at most so long after its sender gave it up or died."""
CLOCKS_S = (0.0, -0.7, 2.0, -30.0, 55.0, 70.0, 600.0, -600.0, 1e6, -1e6)
"""How far the wall clock of a replica may be off."""


@dataclass(frozen=True, slots=True)
class FaultMix:
    """Shares are of calls or of watch events, from 0 to 1; times are means in seconds."""

    disorder: float
    """Rounds of the loop in which what is ready together runs in another order."""
    refused: float
    """Calls that fail before their effect, with 429 or a refused connection."""
    lost: float
    """Calls that take effect and whose answer is lost."""
    late: float
    """Writes that take effect some time after their sender gave them up."""
    doubled: float
    """Writes that arrive twice."""
    conflicts: float
    """Writes that are refused with 409 for no reason."""
    forbidden: float
    """Writes that are refused with 403."""
    slow: float
    """Calls that take seconds."""
    stale: float
    """Watch events that come late."""
    kill_s: float
    """Between two kills of one replica."""
    disturb_s: float
    """Between two disturbances of watches, connections or clocks."""
    agent_away: float
    """Checks of an agent that are followed by its death and a new start."""
    agent_fails: float
    """Revisions that an agent cannot carry out."""

    @classmethod
    def draw(cls, random: Random) -> FaultMix:
        """Draw one: most faults are absent from a story, so that the others show what they do alone."""

        def share(most: float) -> float:
            return random.choice((0.0, 0.0, most / 5, most))

        return cls(
            disorder=random.choice((0.0, 0.1, 0.5, 1.0)),
            refused=share(0.2),
            lost=share(0.2),
            late=share(0.1),
            doubled=share(0.1),
            conflicts=share(0.2),
            forbidden=share(0.03),
            slow=random.choice((0.0, 0.02, 0.1)),
            stale=random.choice((0.0, 0.2, 0.7)),
            kill_s=random.choice((10.0, 30.0, 100.0, 1000.0)),
            disturb_s=random.choice((5.0, 15.0, 1000.0)),
            agent_away=random.choice((0.0, 0.05, 0.2)),
            agent_fails=random.choice((0.0, 0.2, 0.6)),
        )

    @classmethod
    def draw_peaceful(cls, random: Random) -> FaultMix:
        """Draw one in which replicas are killed and watches lag by moments, and nothing else fails."""
        return replace(
            cls(**dict.fromkeys(cls.__dataclass_fields__, 0.0)),
            disorder=random.choice((0.0, 0.1, 0.5, 1.0)),
            stale=random.choice((0.0, 0.2, 0.7)),
            kill_s=random.choice((10.0, 30.0, 100.0, 1000.0)),
            disturb_s=1e9,
        )
