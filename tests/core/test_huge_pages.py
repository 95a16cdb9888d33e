"""Counts of huge pages by page size are read, written and added up in one place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.huge_pages import bytes_in_pages, plain_bytes, read_page_counts, write_page_counts
from kvplace.core.scalars import Bytes

GIB = Bytes(1 << 30)


@given(
    st.dictionaries(st.sampled_from([4096, 1 << 21, 1 << 30, 3 << 10]).map(Bytes), st.integers(0, 1 << 40))
)
def test_counts_written_and_read_are_the_same_counts(counts: dict[Bytes, int]) -> None:
    assert read_page_counts(write_page_counts(counts), "pages") == counts


def test_pages_fill_a_part_of_the_memory() -> None:
    pages = {GIB: 2, Bytes(1 << 21): 512}
    assert bytes_in_pages(pages) == 3 * GIB
    assert plain_bytes(8 * GIB, pages) == 5 * GIB
    assert plain_bytes(2 * GIB, pages) == 0


@pytest.mark.parametrize(
    ("pages", "sentence"),
    [
        ([], 'hugePages is []; it must be an object of counts by page size such as {"1Gi": 8}'),
        ({"1Gb": 1}, "hugePages: '1Gb' is not a quantity such as 8Gi, 512Mi, 4 or 500m"),
        ({"0": 1}, "hugePages: '0' is not a page size; write 2Mi or 1Gi"),
        ({"2Mi": 1, "2048Ki": 1}, "hugePages has pages of 2Mi twice; write one count of them"),
        ({"2Mi": "7"}, "hugePages['2Mi'] is '7'; it must be a whole number from 0 to 1099511627776"),
        ({"2Mi": True}, "hugePages['2Mi'] is true; it must be a whole number from 0 to 1099511627776"),
    ],
    ids=str,
)
def test_wrong_counts_are_refused_with_the_entry(pages: object, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_page_counts(pages, "hugePages")
    assert str(caught.value) == sentence
