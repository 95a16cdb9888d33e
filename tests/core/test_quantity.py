"""Kubernetes quantities are read exactly as the API server reads them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.quantity import about_bytes, format_bytes, parse_bytes, parse_page_counts, parse_quantity
from tests.core.junk import answer_or_sentence


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4", 4),
        ("+4", 4),
        ("-2", -2),
        ("500m", Fraction(1, 2)),
        ("1.5", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("2.", 2),
        ("8Gi", 8 << 30),
        ("1.5Gi", 3 << 29),
        ("129e6", 129_000_000),
        ("1E", 10**18),
        ("1Ei", 1 << 60),
        ("1e3", 1000),
        ("1E3", 1000),
        ("5e-1", Fraction(1, 2)),
        ("12k", 12_000),
        ("7n", Fraction(7, 10**9)),
        (" 8Gi ", 8 << 30),
    ],
)
def test_every_form_of_a_quantity_has_its_value(text: str, value: Fraction | int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text", ["", "Gi", "8gi", "8 Gi", "8GB", "1K", "1e", "0x10", "1_000", "--1", "1e1000", "٣", "NaN", "8Gii"]
)
def test_what_is_no_quantity_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_quantity(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "count"), [("1m", 1), ("1.5", 2), ("1023.0001Ki", 1_047_553), ("2", 2)])
def test_bytes_are_rounded_up_as_kubernetes_does(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_memory_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="'-1Gi' is negative"):
        parse_bytes("-1Gi")


def test_memory_that_no_63_bits_hold_is_refused() -> None:
    assert parse_bytes("9223372036854775807") == (1 << 63) - 1
    with pytest.raises(ValueError, match="'8Ei' is more than Kubernetes can count in bytes"):
        parse_bytes("8Ei")


@given(st.dictionaries(st.sampled_from([4096, 1 << 21, 1 << 30, 3 << 10]), st.integers(0, 1 << 40)))
def test_page_counts_are_read_by_size_in_bytes(counts: dict[int, int]) -> None:
    assert parse_page_counts({format_bytes(size): count for size, count in counts.items()}) == counts


@pytest.mark.parametrize(
    ("pages", "sentence"),
    [
        ([], "must be an object of counts by page size"),
        ({"1Gb": 1}, "'1Gb' is not a quantity such as 8Gi, 512Mi, 4 or 500m"),
        ({"0": 1}, "a page of 0 bytes is none"),
        ({"2Mi": 1, "2048Ki": 1}, "names pages of 2Mi twice"),
        ({"2Mi": "7"}, "'7' pages of 2Mi; it must be a whole number from 0 to 1099511627776"),
        ({"2Mi": True}, "true pages of 2Mi; it must be a whole number from 0 to 1099511627776"),
    ],
    ids=str,
)
def test_page_counts_that_cannot_be_meant_are_refused(pages: object, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_page_counts(pages)
    assert str(caught.value) == sentence


@given(st.integers(0, 1 << 62))
def test_bytes_written_and_read_are_the_same_bytes(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


@given(st.text(max_size=12))
def test_any_text_is_either_a_quantity_or_one_sentence(text: str) -> None:
    value, sentence = answer_or_sentence(parse_quantity, text, ValueError)
    assert value is not None or repr(text) in sentence


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (1, "1"), (1 << 33, "8Gi"), (1536, "1536"), (3 << 19, "1536Ki")]
)
def test_the_largest_suffix_that_loses_nothing_is_written(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (1023, "1023"),
        (8 << 30, "8Gi"),
        (8345600 << 10, "7.96Gi"),
        ((8 << 30) - 1, "8Gi"),
        (10**12, "931Gi"),
        (1536 << 20, "1.5Gi"),
        (1 << 60, "1024Pi"),
    ],
)
def test_bytes_for_people_have_three_digits(count: int, text: str) -> None:
    assert about_bytes(count) == text
