"""Kubernetes quantities are read exactly as the API server reads them, and huge pages by page size."""

from __future__ import annotations

from fractions import Fraction
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.quantity import (
    about_bytes,
    bytes_in_pages,
    format_bytes,
    parse_bytes,
    parse_memory,
    parse_quantity,
    plain_bytes,
    read_page_counts,
    write_page_counts,
)
from kvplace.core.scalars import Bytes
from kvplace.core.strict_json import shown
from tests.core.invalid_input import answer_or_sentence


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
        (5, 5),
        (0.1, Fraction(1, 10)),
        (1e21, 10**21),
    ],
)
def test_every_form_of_a_quantity_has_its_value(text: str | float, value: Fraction | int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "Gi", "8gi", "8 Gi", "8GB", "1K", "1e", "0x10", "1_000", "--1", "1e1000", "٣", "NaN", "8Gii", inf],
)
def test_text_that_is_not_a_quantity_is_refused_by_name(text: str | float) -> None:
    with pytest.raises(ValueError) as caught:
        parse_quantity(text)
    assert repr(text) in str(caught.value)


def test_spaces_around_a_quantity_are_limited_because_it_is_remembered_with_them() -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity("4" + 100 * " ")


@pytest.mark.parametrize(("text", "count"), [("1m", 1), ("1.5", 2), ("1023.0001Ki", 1_047_553), ("2", 2)])
def test_bytes_are_rounded_up_as_kubernetes_does(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_memory_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="'-1Gi' is negative"):
        parse_bytes("-1Gi")


def test_memory_that_no_63_bits_hold_is_refused() -> None:
    assert parse_bytes("9223372036854775807") == (1 << 63) - 1
    with pytest.raises(ValueError, match="'8Ei' is more than 9223372036854775807 bytes"):
        parse_bytes("8Ei")


@pytest.mark.parametrize(
    "text", ["8Gi", "0.5Gi", "0.3Gi", "100k", "64Ki", 8589934592, "1048576", "0", 0, "5000000000m"], ids=repr
)
def test_memory_with_a_unit_and_exact_counts_of_bytes_are_taken(text: str | int) -> None:
    assert parse_memory(text) == parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (32, '32 is 32 bytes; write "32Gi" if that is meant'),
        ("32", "'32' is 32 bytes; write \"32Gi\" if that is meant"),
        (1048575, '1048575 is 1048575 bytes; write "1048575Ki" if that is meant'),
        ("500m", "'500m' is less than a byte; write \"500Mi\" if that is meant"),
        ("0.5", "'0.5' is less than a byte; write \"0.5Gi\" if that is meant"),
        ("1500m", "'1500m' is 2 bytes; write \"1500Mi\" if that is meant"),
        ("1e3", "'1e3' is 1000 bytes; write \"1000Mi\" if that is meant"),
        (511, '511 is 511 bytes; write "511Gi" if that is meant'),
        (512, '512 is 512 bytes; write "512Mi" if that is meant'),
        ("1.5", "'1.5' is 2 bytes; write \"1.5Gi\" if that is meant"),
        ("1024", "'1024' is 1024 bytes; write \"1024Mi\" if that is meant"),
        (65536, '65536 is 65536 bytes; write "65536Mi" if that is meant'),
        (524288, '524288 is 524288 bytes; write "524288Ki" if that is meant'),
    ],
    ids=repr,
)
def test_a_few_bytes_without_a_unit_are_likely_meant_otherwise(text: str | int, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_memory(text)
    assert str(caught.value) == sentence


@given(st.integers(0, 1 << 62))
def test_bytes_written_and_read_are_the_same_bytes(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


@given(st.text(max_size=12))
def test_any_text_is_either_a_quantity_or_one_sentence(text: str) -> None:
    value, sentence = answer_or_sentence(parse_quantity, text, ValueError)
    assert value is not None or shown(text) in sentence


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
