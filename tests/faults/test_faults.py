"""The quick ones of the faults; `python -m tests.faults` plays them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.faulty_cluster import Stage
from tests.faults.scenario import OwnStory, Scenario
from tests.faults.scenarios import SCENARIOS

pytestmark = pytest.mark.control_plane


@pytest.fixture(scope="module")
def stage(kubernetes_programs: Path) -> Iterator[Stage]:
    """Start the cluster that all faults share."""
    assert kubernetes_programs.is_dir()
    with Stage() as running:
        yield running


@pytest.mark.parametrize("scenario", [pytest.param(one, id=one.name) for one in SCENARIOS if one.quick])
def test_after_a_fault_every_pod_is_bound_and_no_core_has_two_owners_or_is_lost(
    stage: Stage, scenario: Scenario | OwnStory, record_property: Callable[[str, object], None]
) -> None:
    outcome = scenario.play(stage)

    record_property("seconds_until_all_were_bound", outcome.bound_s)
    record_property("seconds_until_all_cores_were_free", outcome.freed_s)
