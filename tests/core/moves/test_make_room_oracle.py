"""Making room, against every sequence of moves that there is on small machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, combinations
from random import Random
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.moves.make_room import make_room
from kvplace.core.occupant import Occupant, RunningVms, bytes_moved, locality_of, within
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.topology import NumaNode, Package, Topology
from tests.core.allocator.running import occupied
from tests.core.machines import GIB, PINNING, requests, topologies

_placed = lru_cache(maxsize=200_000)(place)


def _targets(topology: Topology, one: Occupant, free: Free) -> Iterator[Placement]:
    """Every place that a VM may take: exactly these CPUs, no worse than where it sat first."""
    available = free.cpus if one.request.owns_cpus else free.pool
    cpus = list(cpus_of(available))
    sizes = range(1, len(cpus) + 1)
    if one.request.options.smt is Smt.PREFER:
        count = one.placement.cpus.bit_count()
        sizes = range(count, count + 1)
    for size in sizes:
        for chosen in combinations(cpus, size):
            mask = mask_of(chosen)
            found = _placed(topology, within(free, mask), one.request)
            if isinstance(found, Refusal) or (one.request.owns_cpus and found.owned != mask):
                continue
            if locality_of(topology, found) <= locality_of(topology, one.placement):
                yield found


def fewest_and_cheapest(
    topology: Topology, occupants: Sequence[Occupant], request: Request, most_moves: int
) -> tuple[int, int] | None:
    """Find the fewest moves and their least cost by trying all of them."""
    empty = place(topology, free_of(topology, Ledger()), request)
    if isinstance(empty, Refusal):
        return None
    running_vms = RunningVms(topology, occupants, None)
    states: dict[tuple[tuple[int, ...], ...], tuple[int, dict[str, Placement | None]]] = {(): (0, {})}
    for moves in range(most_moves + 1):
        well = []
        for cost, now in states.values():
            found = _placed(topology, running_vms.free(now), request)
            if isinstance(found, Placement) and len(found.numa_nodes) <= len(empty.numa_nodes):
                well.append(cost)
        if well:
            return moves, min(well)
        following: dict[tuple[tuple[int, ...], ...], tuple[int, dict[str, Placement | None]]] = {}
        for cost, now in states.values() if moves < most_moves else ():
            for one in occupants:
                if one.request.options.policy is Policy.IMMOVABLE:
                    continue
                before = now.get(one.id) or one.placement
                for after in _targets(topology, one, running_vms.free({**now, one.id: None})):
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


_slow = settings(suppress_health_check=list(HealthCheck), deadline=None)


@st.composite
def regular(draw: st.DrawFn, *, most_cpus: int) -> Topology:
    """A machine of like NUMA nodes, on which moves help more often than on one of random sets."""
    nodes, threads = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    width = draw(st.integers(1, max(1, most_cpus // nodes // threads))) * threads
    return _like_nodes(nodes, width, threads, draw(st.sampled_from([0, 4 * GIB])))


def _like_nodes(nodes: int, width: int, threads: int, memory: int) -> Topology:
    each = [mask_of(range(node * width, (node + 1) * width)) for node in range(nodes)]
    return Topology(
        packages=(Package(0, mask_of(range(nodes * width))),),
        numa_nodes=tuple(NumaNode(number, cpus, memory) for number, cpus in enumerate(each)),
        l3_groups=tuple(each),
        cores=tuple(mask_of(range(first, first + threads)) for first in range(0, nodes * width, threads)),
    )


@st.composite
def crowded(
    draw: st.DrawFn, *, most_cpus: int, policies: Sequence[Policy] = PINNING
) -> tuple[Topology, list[Occupant], Request]:
    """A machine, the VMs that run there, and a new one that as many CPUs are free for."""
    topology = draw(regular(most_cpus=most_cpus) | topologies(most_cpus=most_cpus))
    small = requests(most_vcpus=3, policies=policies)
    if light := draw(st.booleans()):
        small = small.map(_light)
    occupants = draw(occupied(topology, small, least=3, most=6))
    count = max(1, RunningVms(topology, occupants, None).free({}).cpus.bit_count())
    request = draw(requests(most_vcpus=count, policies=policies))
    return topology, occupants, _light(request) if light else request


@st.composite
def tight(draw: st.DrawFn) -> tuple[Topology, list[Occupant], Request]:
    """NUMA nodes full of VMs that fit one of them each, and a new one that needs several to go."""
    chance = Random(draw(st.integers(0, 1 << 32)))
    widths = [chance.randint(2, 4) for _ in range(chance.randint(2, 4))]
    while sum(widths) > 11:
        widths.pop()
    memory = chance.choice([0, GIB])
    ends = list(accumulate(widths))
    each = [mask_of(range(end - width, end)) for end, width in zip(ends, widths, strict=True)]
    topology = Topology(
        packages=(Package(0, mask_of(range(ends[-1]))),),
        numa_nodes=tuple(
            NumaNode(number, cpus, chance.randint(2, 9) * GIB) for number, cpus in enumerate(each)
        ),
        l3_groups=tuple(each),
        cores=tuple(1 << cpu for cpu in range(ends[-1])),
    )
    occupants: list[Occupant] = []
    for number in range(10):
        free = RunningVms(topology, occupants, None).free({})
        if free.cpus.bit_count() <= max(widths):
            break
        request = Request(
            chance.randint(1, 3), PinningOptions(scope=Scope.ONE_NUMA), memory=chance.randint(0, 3) * memory
        )
        found = place(topology, within(free, chance.choice(each)), request)
        if isinstance(found, Placement):
            occupants.append(Occupant(f"vm-{number}", request, found))
    left = RunningVms(topology, occupants, None).free({}).cpus.bit_count()
    return topology, occupants, Request(min(left, max(widths)), PinningOptions(scope=Scope.ONE_NUMA))


def _light(request: Request) -> Request:
    """The same VM without what seldom fits a small machine."""
    return replace(
        request,
        options=replace(request.options, emulator_threads=EmulatorThreads.SHARED),
        memory=0,
        huge_pages={},
    )


def _agrees(
    topology: Topology,
    occupants: list[Occupant],
    request: Request,
    most_moves: int,
    *,
    thorough: bool = False,
) -> None:
    found = make_room(topology, occupants, request, most_moves=most_moves, thorough=thorough)
    truth = fewest_and_cheapest(topology, occupants, request, most_moves)
    assert (None if found is None else (len(found.moves), found.bytes_moved)) == truth


@_slow
@given(crowded(most_cpus=8))
def test_up_to_two_moves_are_as_few_and_cheap_as_moves_can_be(
    given_: tuple[Topology, list[Occupant], Request],
) -> None:
    _agrees(*given_, 2)


@_slow
@given(crowded(most_cpus=7, policies=[Policy.EXCLUSIVE]) | tight())
def test_up_to_three_moves_are_as_few_and_cheap_as_moves_can_be(
    given_: tuple[Topology, list[Occupant], Request],
) -> None:
    _agrees(*given_, 3)


@_slow
@given(tight())
def test_a_thorough_search_keeps_no_bound_on_any_machine(
    given_: tuple[Topology, list[Occupant], Request],
) -> None:
    with patch.multiple("kvplace.core.moves.move_search", _SMALL_MACHINE=0, _MOST_EFFORT=0):
        _agrees(*given_, 3, thorough=True)


def test_the_bound_costs_answers_of_three_moves_only() -> None:
    """Four NUMA nodes have a CPU to spare each: the three VMs of one go to the others."""
    each = [mask_of(range(first, first + 4)) for first in (0, 4, 8, 12)]
    topology = _like_nodes(4, 4, 1, 0)
    occupants = [
        Occupant(f"{node}-{number}", request, placement)
        for node, cpus in enumerate(each)
        for number in range(3)
        if isinstance(
            placement := place(
                topology,
                within(free_of(topology, Ledger()), cpus & ~mask_of(range(node * 4, node * 4 + number))),
                request := Request(1, PinningOptions(scope=Scope.ONE_NUMA)),
            ),
            Placement,
        )
    ]
    new = Request(4, PinningOptions(scope=Scope.ONE_NUMA))
    with patch.multiple("kvplace.core.moves.move_search", _SMALL_MACHINE=0, _MOST_EFFORT=0):
        assert make_room(topology, occupants, new) is None
        room = make_room(topology, occupants, new, thorough=True)
    assert room is not None
    assert len(room.moves) == 3
