"""The part of protocol buffers that KubeVirt's hooks and the kubelet's podresources need.

Unknown fields are skipped, and of a repeated field the last one counts, as the format specifies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Longest message in either direction; by default grpc-go's client accepts no longer answer."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class BadMessage(ValueError):
    """Bytes that are not a protocol buffer message."""


def bytes_field(number: int, value: bytes | str) -> bytes:
    """Write one length-delimited field: bytes, a string, or a message already written."""
    raw = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(raw)) + raw


def bytes_fields(number: int, values: Iterable[bytes | str]) -> bytes:
    """Write a repeated length-delimited field."""
    return b"".join(bytes_field(number, value) for value in values)


def read_bytes_fields(message: bytes) -> dict[int, bytes]:
    """Read the length-delimited fields of a message by number; raises BadMessage."""
    return {number: value for number, value in fields_of(message) if isinstance(value, bytes)}


def fields_of(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield every length-delimited field and every number of a message in their order; raises BadMessage."""
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise BadMessage("the message has a field with number 0")
        if kind == _VARINT:
            value, position = _read_varint(message, position)
            yield number, value
            continue
        if kind == _BYTES:
            length, position = _read_varint(message, position)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise BadMessage(f"field {number} of the message has the unknown wire type {kind}")
        if length > len(message) - position:
            raise BadMessage(f"field {number} of the message is cut off")
        if kind == _BYTES:
            yield number, message[position : position + length]
        position += length


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for count, byte in enumerate(message[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    raise BadMessage("a number in the message is cut off or too long")
