"""The faults that are played, each by name."""

from __future__ import annotations

from tests.faults.calls import CALLS
from tests.faults.kills import KILLS
from tests.faults.scenario import OwnStory, Scenario
from tests.faults.sharing import SHARING
from tests.faults.surroundings import SURROUNDINGS

SCENARIOS: tuple[Scenario | OwnStory, ...] = (
    Scenario("none", "no fault"),
    *KILLS,
    *CALLS,
    *SURROUNDINGS,
    *SHARING,
)
