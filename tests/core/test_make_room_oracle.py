"""Making room, against every sequence of moves that there is on small machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplace.core.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.make_room import make_room
from kvplace.core.occupant import Occupant, Standing, bytes_moved, sitting_of, within
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request import Policy, Request, Smt
from kvplace.core.topology import Topology
from tests.core.machines import requests, topologies
from tests.core.running import occupied

_placed = lru_cache(maxsize=200_000)(place)


def _targets(topology: Topology, one: Occupant, free: Free) -> Iterator[Placement]:
    """Every place that a VM may take: exactly these CPUs, no worse than where it sat first."""
    available = free.cpus if one.request.owns_cpus else free.pool
    cpus = list(cpus_of(available))
    sizes = range(1, len(cpus) + 1)
    if one.request.owns_cpus and one.request.smt is Smt.PREFER:
        sizes = range(one.placement.owned.bit_count(), one.placement.owned.bit_count() + 1)
    elif not one.request.owns_cpus:
        sizes = range(one.placement.cpus.bit_count(), one.placement.cpus.bit_count() + 1)
    for size in sizes:
        for chosen in combinations(cpus, size):
            mask = mask_of(chosen)
            found = _placed(topology, within(free, mask), one.request)
            if isinstance(found, Refusal) or (found.owned or found.cpus) != mask:
                continue
            if sitting_of(topology, found) <= sitting_of(topology, one.placement):
                yield found


def fewest_and_cheapest(
    topology: Topology, occupants: Sequence[Occupant], request: Request, most_moves: int
) -> tuple[int, int] | None:
    """Find the fewest moves and their least cost by trying all of them."""
    empty = place(topology, free_of(topology, Ledger()), request)
    if isinstance(empty, Refusal):
        return None
    standing = Standing(topology, occupants, None)
    states: dict[tuple[tuple[int, ...], ...], tuple[int, dict[str, Placement | None]]] = {(): (0, {})}
    for moves in range(most_moves + 1):
        well = []
        for cost, now in states.values():
            found = _placed(topology, standing.free(now), request)
            if isinstance(found, Placement) and len(found.numa_nodes) <= len(empty.numa_nodes):
                well.append(cost)
        if well:
            return moves, min(well)
        following: dict[tuple[tuple[int, ...], ...], tuple[int, dict[str, Placement | None]]] = {}
        for cost, now in states.values() if moves < most_moves else ():
            for one in occupants:
                if one.request.policy is Policy.IMMOVABLE:
                    continue
                before = now.get(one.id) or one.placement
                for after in _targets(topology, one, standing.free({**now, one.id: None})):
                    total = cost + bytes_moved(one.request, before, after)
                    then = {**now, one.id: after}
                    key = tuple(
                        (place_.cpus, *place_.numa_nodes) if (place_ := then.get(other.id)) else ()
                        for other in occupants
                    )
                    if key not in following or following[key][0] > total:
                        following[key] = (total, then)
        states = following
    return None


_machines = topologies(most_cpus=8)
_slow = settings(suppress_health_check=list(HealthCheck), deadline=None)


def _agrees(topology: Topology, occupants: list[Occupant], request: Request, most_moves: int) -> None:
    found = make_room(topology, occupants, request, most_moves=most_moves)
    truth = fewest_and_cheapest(topology, occupants, request, most_moves)
    assert (None if found is None else (len(found.moves), found.bytes_moved)) == truth


@_slow
@given(st.data())
def test_up_to_two_moves_are_as_few_and_cheap_as_moves_can_be(data: st.DataObject) -> None:
    topology = data.draw(_machines)
    occupants = data.draw(occupied(topology, requests(most_vcpus=5)))
    _agrees(topology, occupants, data.draw(requests(most_vcpus=8)), 2)


@_slow
@given(st.data())
def test_up_to_three_moves_are_as_few_and_cheap_as_moves_can_be(data: st.DataObject) -> None:
    topology = data.draw(topologies(most_cpus=6))
    exclusive = requests(most_vcpus=4, policies=[Policy.EXCLUSIVE])
    occupants = data.draw(occupied(topology, exclusive, most=4))
    _agrees(topology, occupants, data.draw(requests(most_vcpus=6, policies=[Policy.EXCLUSIVE])), 3)
