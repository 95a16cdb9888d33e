"""The set of sizes that fills a room fullest, against all sets."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cluster.bin_packing import FillOrder, best_filling


@given(
    st.integers(0, 40),
    st.dictionaries(st.integers(1, 18), st.integers(0, 4), max_size=5),
    st.sampled_from(FillOrder),
)
def test_no_other_set_leaves_less(room: int, numbers: dict[int, int], first: FillOrder) -> None:
    chosen = best_filling(room, numbers, first)
    assert all(0 < count <= numbers[size] for size, count in chosen)
    assert len({size for size, _ in chosen}) == len(chosen)
    sums = (
        sum(size * count for size, count in zip(numbers, counts, strict=True))
        for counts in product(*(range(number + 1) for number in numbers.values()))
    )
    assert sum(size * count for size, count in chosen) == max(one for one in sums if one <= room)


def test_of_equal_sets_the_one_with_the_largest_sizes_or_with_the_most_wanted_is_taken() -> None:
    assert best_filling(12, {12: 1, 4: 9, 3: 1}, FillOrder.LARGE) == [(12, 1)]
    assert best_filling(12, {12: 1, 4: 9, 3: 1}, FillOrder.COMMON) == [(4, 3)]
