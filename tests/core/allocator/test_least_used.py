"""Of so many cores the CPUs that others use least, compared with every way there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import assume, given
from hypothesis import strategies as st

from kvplace.core.allocator.least_used import Usage, least_used
from kvplace.core.cpuset import cpus_of

Cores = Sequence[tuple[int, int]]

uses_of_cores = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=2), min_size=1, max_size=6)
uses_of_wide_cores = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4)


def laid_out(uses_of_cores: list[list[int]]) -> tuple[Cores, dict[int, int]]:
    """Cores with their units, and what others use of each CPU."""
    cores: list[tuple[int, int]] = []
    uses: dict[int, int] = {}
    for of_core in uses_of_cores:
        cores.append((((1 << len(of_core)) - 1) << len(uses), len(of_core)))
        uses |= dict(enumerate(of_core, start=len(uses)))
    return cores, uses


def costs_of_all_ways(
    uses_of_cores: list[list[int]], need: int, homes: Sequence[int] = ()
) -> Iterator[tuple[int, int]]:
    """How many cores each way to cover a need opens, in every home one, and how much others use of it."""
    for way in product(*(range(len(of_core) + 1) for of_core in uses_of_cores)):
        touched = {home for home, count in zip(homes, way, strict=False) if count}
        if sum(way) == need and touched == set(homes):
            yield (
                sum(1 for count in way if count),
                sum(sum(sorted(of_core)[:count]) for of_core, count in zip(uses_of_cores, way, strict=True)),
            )


@given(uses_of_cores | uses_of_wide_cores, st.integers(1, 16), st.integers(1, 6))
def test_no_choice_of_so_many_cores_is_used_less_by_others(
    of_cores: list[list[int]], need: int, count: int
) -> None:
    cores, uses = laid_out(of_cores)
    ways = [cost for opened, cost in costs_of_all_ways(of_cores, need) if opened == count]
    assume(ways)
    found = least_used(Usage(uses).offers(cores), need, count)
    assert all((core, core.bit_count()) in cores and not cpus & ~core for core, cpus in found.taken)
    assert len(found.taken) == count
    assert sum(cpus.bit_count() for _, cpus in found.taken) == need
    assert sum(uses[cpu] for _, cpus in found.taken for cpu in cpus_of(cpus)) == found.cost == min(ways)


@given(uses_of_cores, st.integers(1, 12), st.integers(1, 6), st.integers(1, 3))
def test_nor_is_one_that_takes_something_of_every_numa_node(
    of_cores: list[list[int]], need: int, count: int, nodes: int
) -> None:
    cores, uses = laid_out(of_cores)
    homes = [place % nodes for place in range(len(cores))]
    ways = [cost for opened, cost in costs_of_all_ways(of_cores, need, homes) if opened == count]
    assume(ways)
    touched = [
        sum(core for (core, _), home in zip(cores, homes, strict=True) if home == node) for node in set(homes)
    ]
    found = least_used(Usage(uses).offers(cores), need, count, touched)
    assert all(any(cpus & node for _, cpus in found.taken) for node in touched)
    assert sum(cpus.bit_count() for _, cpus in found.taken) == need
    assert (len(found.taken), found.cost) == (count, min(ways))


@given(uses_of_cores | uses_of_wide_cores, st.integers(1, 16), st.integers(1, 6))
def test_nothing_costs_less_than_its_price_without_what_is_worth_more(
    of_cores: list[list[int]], need: int, count: int
) -> None:
    cores, uses = laid_out(of_cores)
    ways = [cost for opened, cost in costs_of_all_ways(of_cores, need) if opened == count]
    assume(ways)
    offers = Usage(uses).offers(cores)
    prices = least_used(offers, need, count).prices
    assert prices.of(count, need) - prices.worth(offers) <= min(ways)
