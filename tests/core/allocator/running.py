"""Machines on which VMs run, strewn as after a long life, for property tests."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.occupant import Occupant, RunningVms, within
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.topology import Topology


@st.composite
def occupied(
    draw: st.DrawFn,
    topology: Topology,
    requests: st.SearchStrategy[Request],
    *,
    least: int = 0,
    most: int = 5,
) -> list[Occupant]:
    """VMs that run on a machine, each put where it happened to fit at its time."""
    chance = Random(draw(st.integers(0, 1 << 32)))
    occupants: list[Occupant] = []
    for number, request in enumerate(draw(st.lists(requests, min_size=least, max_size=most))):
        free = RunningVms(topology, occupants, None).free({})
        cpus = list(cpus_of(free.pool))
        some = mask_of(chance.sample(cpus, chance.randint(0, len(cpus))))
        for choice in (within(free, some), free):
            found = place(topology, choice, request)
            if isinstance(found, Placement):
                occupants.append(Occupant(f"vm-{number}", request, found))
                break
    return [one for one in occupants if chance.random() < 0.85]
