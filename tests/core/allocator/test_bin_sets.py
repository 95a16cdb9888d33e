"""Sets of L3 groups and the cores in them, compared with all sets of them and all sets of their cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from kvplace.core.allocator.bin_sets import BinSets, most_worth
from kvplace.core.allocator.covering import covers
from kvplace.core.allocator.layout import Bin

amounts = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=7)
widths_of_bins = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4
) | st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=2), min_size=1, max_size=5)


def bins_of(widths_of_bins: list[list[int]]) -> list[Bin]:
    """Bins with cores of such widths, whose CPUs are numbered one after the other."""
    bins = []
    cpu = 0
    for unordered in widths_of_bins:
        cores = []
        for width in sorted(unordered, reverse=True):
            cores.append((((1 << width) - 1) << cpu, width))
            cpu += width
        bins.append(Bin(sum(unordered), tuple(cores), tuple(width for _, width in cores)))
    return bins


def sizes_of_all_ways(
    bins: Sequence[Bin], need: int, touched: Sequence[int] = ()
) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """Bins and cores of every set of cores that covers a need and touches all sets, and which bins."""
    cores = [(core, index) for index, one in enumerate(bins) for core, _ in one.cores]
    for chosen in chain.from_iterable(combinations(cores, count) for count in range(1, need + 1)):
        if sum(core.bit_count() for core, _ in chosen) >= need and all(
            any(core & cpus for core, _ in chosen) for cpus in touched
        ):
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
    assert sorted(covers(units, range(len(groups)), need, count, also=also)) == every
    unlike = {tuple(sorted(groups[index] for index in chosen)) for chosen in every}
    alike = list(covers(units, others, need, count, also=also))
    assert {tuple(sorted(groups[index] for index in chosen)) for chosen in alike} == unlike
    assert len(alike) == len(unlike)


@given(widths_of_bins, st.integers(1, 10))
def test_the_fewest_bins_and_of_those_the_fewest_cores_are_found(widths: list[list[int]], need: int) -> None:
    bins = bins_of(widths)
    assume(sum(one.units for one in bins) >= need)
    count, cores, found = BinSets(bins, need).smallest()
    assert ((count, cores), tuple(sorted(found))) in set(sizes_of_all_ways(bins, need))
    assert (count, cores) == min(sizes_of_all_ways(bins, need))[0]


@given(widths_of_bins, st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_they_are_also_when_every_numa_node_must_give_a_cpu(
    widths: list[list[int]], need: int, nodes: int, across: bool
) -> None:
    bins = bins_of(widths)
    dealt = [core for one in bins for core, _ in one.cores] if across else [one_mask(one) for one in bins]
    touched = [sum(dealt[node::nodes]) for node in range(min(nodes, len(dealt)))]
    assume(sum(one.units for one in bins) >= need >= len(touched))
    count, cores, found = BinSets(bins, need, touched).smallest()
    every = set(sizes_of_all_ways(bins, need, touched))
    assert (count, cores) == min(every)[0]
    assert ((count, cores), tuple(sorted(found))) in every


@given(widths_of_bins, st.integers(1, 10), st.data())
def test_no_set_is_worth_more_than_the_bound_and_the_best_is_found(
    widths: list[list[int]], need: int, data: st.DataObject
) -> None:
    bins = bins_of(widths)
    assume(sum(one.units for one in bins) >= need)
    worths = data.draw(st.lists(st.integers(0, 9), min_size=len(bins), max_size=len(bins)))
    sets = BinSets(bins, need)
    count, cores, _ = sets.smallest()
    best = max(
        sum(worths[index] for index in used)
        for size, used in sizes_of_all_ways(bins, need)
        if size == (count, cores)
    )
    assert most_worth(bins, worths, need, (count, cores)) >= best
    assert any(
        sum(worths[index] for index in found) == best for found in sets.chosen(count, cores, worths, best)
    )
    assert not any(sets.chosen(count, cores, worths, best + 1))


def one_mask(one: Bin) -> int:
    return sum(core for core, _ in one.cores)
