"""Protocol buffers as KubeVirt writes and reads them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.protobuf import BadMessage, bytes_field, bytes_fields, fields_of, read_bytes_fields

numbers = st.integers(1, (1 << 29) - 1)


@given(st.dictionaries(numbers, st.binary(max_size=300), max_size=5))
def test_written_fields_are_read_back(fields: dict[int, bytes]) -> None:
    message = b"".join(bytes_field(number, value) for number, value in fields.items())
    assert read_bytes_fields(message) == fields


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(junk: bytes) -> None:
    with contextlib.suppress(BadMessage):
        assert sum(len(value) for value in read_bytes_fields(junk).values()) <= len(junk)


def test_bytes_are_laid_out_as_the_format_states() -> None:
    assert bytes_field(1, "kvplace") == b"\x0a\x07kvplace"
    assert bytes_field(2, b"x" * 300) == b"\x12\xac\x02" + b"x" * 300
    assert bytes_fields(4, ("a", "bc")) == b"\x22\x01a\x22\x02bc"


def test_of_a_repeated_field_the_last_counts_and_unknown_kinds_are_skipped() -> None:
    message = b"\x0a\x01a" + b"\x10\x96\x01" + b"\x1d1234" + b"\x2112345678" + b"\x0a\x01b"
    assert read_bytes_fields(message) == {1: b"b"}


def test_all_fields_are_read_in_their_order_numbers_too() -> None:
    message = b"\x0a\x01a" + b"\x10\x96\x01" + b"\x1d1234" + b"\x0a\x01b"
    assert list(fields_of(message)) == [(1, b"a"), (2, 150), (1, b"b")]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (b"\x0a", "cut off or too long"),
        (b"\x0a\x05abc", "field 1 of the message is cut off"),
        (b"\x0a" + b"\xff" * 11, "cut off or too long"),
        (b"\x02\x00", "number 0"),
        (b"\x0b", "unknown wire type 3"),
        (b"\x1d12", "field 3 of the message is cut off"),
    ],
)
def test_a_broken_message_is_refused(message: bytes, sentence: str) -> None:
    with pytest.raises(BadMessage, match=sentence):
        read_bytes_fields(message)
