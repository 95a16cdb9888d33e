"""Of the fewest cores the CPUs that others use least, compared with every way there is."""

from __future__ import annotations

from itertools import product

from hypothesis import assume, given
from hypothesis import strategies as st

from kvplace.core.allocator.least_used import Usage, least_used
from kvplace.core.allocator.supply import fewest
from kvplace.core.cpuset import cpus_of

cores_and_uses = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=2), min_size=1, max_size=6)
wide_cores_and_uses = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4)


@given(cores_and_uses | wide_cores_and_uses, st.integers(1, 16))
def test_no_choice_of_as_few_cores_is_used_less_by_others(uses_of_cores: list[list[int]], need: int) -> None:
    assume(need <= sum(map(len, uses_of_cores)))
    cores: list[tuple[int, int]] = []
    uses: dict[int, int] = {}
    for of_core in uses_of_cores:
        cores.append((((1 << len(of_core)) - 1) << len(uses), len(of_core)))
        uses |= dict(enumerate(of_core, start=len(uses)))
    count = fewest([width for _, width in cores], need)
    taken = least_used(Usage(uses).offers(cores), need, count).taken
    assert all((core, core.bit_count()) in cores and not cpus & ~core for core, cpus in taken)
    assert sum(cpus.bit_count() for _, cpus in taken) == need
    cost = sum(uses[cpu] for _, cpus in taken for cpu in cpus_of(cpus))
    ways = product(*(range(width + 1) for _, width in cores))
    assert (len(taken), cost) == min(
        (
            sum(1 for count in way if count),
            sum(sum(sorted(of_core)[:count]) for of_core, count in zip(uses_of_cores, way, strict=True)),
        )
        for way in ways
        if sum(way) == need
    )
