"""Sets of L3 groups and the cores in them, compared with all sets of them and all sets of their cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from kvplace.core.allocator.layout import L3Part
from kvplace.core.allocator.set_cover import L3Sets, covers
from kvplace.core.scalars import CpuMask
from kvplace.core.search_budget import SearchBudget

amounts = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=7)
widths_of_l3_parts = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4
) | st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=2), min_size=1, max_size=5)


def l3_parts_of(widths_of_l3_parts: list[list[int]]) -> list[L3Part]:
    """L3 parts with cores of such widths, whose CPUs are numbered one after the other."""
    l3_parts = []
    cpu = 0
    for unordered in widths_of_l3_parts:
        cores = []
        for width in sorted(unordered, reverse=True):
            cores.append((CpuMask(((1 << width) - 1) << cpu), width))
            cpu += width
        l3_parts.append(L3Part(sum(unordered), tuple(cores), tuple(width for _, width in cores)))
    return l3_parts


def sizes_of_all_ways(
    l3_parts: Sequence[L3Part], need: int
) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """L3 parts and cores of every set of cores that covers a need, and which L3 parts they are."""
    cores = [(core, index) for index, one in enumerate(l3_parts) for core, _ in one.cores]
    for chosen in chain.from_iterable(combinations(cores, count) for count in range(1, need + 1)):
        if sum(core.bit_count() for core, _ in chosen) >= need:
            used = tuple(sorted({index for _, index in chosen}))
            yield (len(used), len(chosen)), used


@given(amounts, st.integers(0, 20), st.integers(0, 8), st.integers(1, 7))
def test_every_cover_comes_once(groups: list[tuple[int, int]], need: int, second: int, count: int) -> None:
    units, others = [group[0] for group in groups], [group[1] for group in groups]
    every = [
        chosen
        for chosen in combinations(range(len(groups)), count)
        if sum(units[index] for index in chosen) >= need and sum(others[index] for index in chosen) >= second
    ]
    also = [(others, second)]
    assert sorted(covers(units, range(len(groups)), need, count, SearchBudget(10**6), also=also)) == every
    unlike = {tuple(sorted(groups[index] for index in chosen)) for chosen in every}
    alike = list(covers(units, others, need, count, SearchBudget(10**6), also=also))
    assert {tuple(sorted(groups[index] for index in chosen)) for chosen in alike} == unlike
    assert len(alike) == len(unlike)


@given(widths_of_l3_parts, st.integers(1, 10))
def test_the_fewest_l3_parts_and_of_those_the_fewest_cores_are_found(
    widths: list[list[int]], need: int
) -> None:
    l3_parts = l3_parts_of(widths)
    assume(sum(one.units for one in l3_parts) >= need)
    count, cores, found = L3Sets(l3_parts, need, SearchBudget(10**6)).smallest()
    assert ((count, cores), tuple(sorted(found))) in set(sizes_of_all_ways(l3_parts, need))
    assert (count, cores) == min(sizes_of_all_ways(l3_parts, need))[0]
