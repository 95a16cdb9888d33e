"""Making room, against every sequence of moves that there is on small machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, combinations
from random import Random

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.moves.make_room import MovePlan, make_room
from kvplace.core.occupant import Occupant, RunningVms, bytes_moved, locality_of
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes
from kvplace.core.topology import Topology
from tests.core.machines import GIB, make_node, make_numa_node, make_package, make_topology
from tests.core.moves.fragmented import PINNED, Case, fragmented
from tests.profiles import rounds

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
            found = _placed(topology, free.within(mask), one.request)
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
    running = RunningVms(make_node(topology, occupants))
    states: dict[tuple[tuple[int, ...], ...], tuple[int, dict[str, Placement | None]]] = {(): (0, {})}
    for moves in range(most_moves + 1):
        well = []
        for cost, now in states.values():
            found = _placed(topology, running.free(now), request)
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
                for after in _targets(topology, one, running.free({**now, one.id: None})):
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


def _exercise(cases: Iterable[Case], most_moves: int) -> Counter[int | None]:
    """Compare every case with the exhaustive search; count the moves that were needed, None for no answer."""
    counts: Counter[int | None] = Counter()
    for number, case in enumerate(cases):
        found = make_room(case.node, case.request, most_moves=most_moves)
        ours = (len(found.moves), found.bytes_moved) if isinstance(found, MovePlan) else None
        truth = fewest_and_cheapest(case.topology, case.occupants, case.request, most_moves)
        assert ours == truth, (number, case)
        counts[None if truth is None else truth[0]] += 1
    return counts


def test_up_to_two_moves_are_as_few_and_cheap_as_moves_can_be() -> None:
    seeds = rounds(400, quick=80)
    counts = _exercise((fragmented(Random(seed), most_cpus=8, policies=PINNED) for seed in range(seeds)), 2)
    assert counts[1] >= rounds(150, quick=0)
    assert counts[2] >= rounds(15, quick=0)
    assert counts[None] >= rounds(100, quick=0)


def test_moves_of_exclusive_vms_on_full_machines_are_as_few_and_cheap_as_moves_can_be() -> None:
    seeds = rounds(300, quick=60)
    counts = _exercise((tight(Random(seed)) for seed in range(seeds)), 2)
    assert counts[1] >= rounds(60, quick=0)
    assert counts[2] >= rounds(30, quick=0)
    assert counts[None] >= rounds(30, quick=0)


def tight(chance: Random) -> Case:
    """NUMA nodes full of VMs that fit one of them each, and a new one that needs several to go."""
    widths = [chance.randint(2, 4) for _ in range(chance.randint(2, 4))]
    while sum(widths) > 11:
        widths.pop()
    memory = chance.choice([0, GIB])
    ends = list(accumulate(widths))
    each = [mask_of(range(end - width, end)) for end, width in zip(ends, widths, strict=True)]
    topology = make_topology(
        packages=(make_package(0, mask_of(range(ends[-1]))),),
        numa_nodes=tuple(
            make_numa_node(number, cpus, chance.randint(2, 9) * GIB) for number, cpus in enumerate(each)
        ),
        l3_groups=tuple(each),
        cores=tuple(1 << cpu for cpu in range(ends[-1])),
    )
    occupants: list[Occupant] = []
    options = PinningOptions(scope=Scope.ONE_NUMA)
    for number in range(10):
        free = make_node(topology, occupants).free
        if free.cpus.bit_count() <= max(widths):
            break
        request = Request(chance.randint(1, 3), options, memory=Bytes(chance.randint(0, 3) * memory))
        found = place(topology, free.within(chance.choice(each)), request)
        if isinstance(found, Placement):
            occupants.append(Occupant(f"vm-{number}", request, found))
    left = make_node(topology, occupants).free.cpus.bit_count()
    return Case(topology, occupants, Request(min(left, max(widths)), options))
