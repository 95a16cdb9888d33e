"""The best result for a user with knowledge of the future, in loads small enough to see it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks._foresight import Foresight, fewest_split
from benchmarks._load import vm_of
from kvplace.simulate.scenario import Arrival, Departure, LoadEvent, SimulatedVm

pytest.importorskip("highspy", reason="needs the extra `bench`")


def _load(*steps: int) -> list[LoadEvent]:
    """A load in steps: a size arrives, a negative number lets the VM of that place in the order leave."""
    vms: list[SimulatedVm] = []
    events: list[LoadEvent] = []
    for step in steps:
        if step > 0:
            vms.append(vm_of(len(vms), step))
            events.append(Arrival(vms[-1]))
        else:
            events.append(Departure(vms[-step - 1]))
    return events


@pytest.mark.parametrize(
    ("load", "split"),
    [
        (_load(2, 2, 4), 0),
        (_load(3, 3, 2), 1),
        (_load(2, 2, 2, -2, 4), 0),
        (_load(4, 2, 2, -1, 3, -2, 3), 1),
        (_load(2, 2, 2, 2, -1, -2, 4, -3, -4, 4), 0),
    ],
)
def test_the_fewest_vms_are_split_on_two_nodes_of_four(load: Sequence[LoadEvent], split: int) -> None:
    assert fewest_split(load, (4, 4), seconds=20) == Foresight(split, split)
