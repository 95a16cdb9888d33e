"""The wire format of protocol buffers and of NRI's frames, written for the tests alone.

The code under test uses the protobuf library and its own frames; nothing here shares either with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from struct import pack

Value = bytes | str | int
Fields = Mapping[int, Value | Sequence[Value]]
PLUGIN, RUNTIME = 1, 2
REQUEST, RESPONSE = 1, 2


def message(fields: Fields) -> bytes:
    """Write a message from its fields by number; a list is a repeated field."""
    written = b""
    for number, values in fields.items():
        for value in values if isinstance(values, list | tuple) else [values]:
            if isinstance(value, int):
                written += _varint(number << 3) + _varint(value)
            else:
                raw = value.encode() if isinstance(value, str) else value
                assert isinstance(raw, bytes)
                written += _varint(number << 3 | 2) + _varint(len(raw)) + raw
    return written


def fields(written: bytes) -> dict[int, list[bytes | int]]:
    """Read a message of numbers, strings and messages."""
    found: dict[int, list[bytes | int]] = {}
    rest = memoryview(written)
    while rest:
        key, rest = _read_varint(rest)
        number, rest = _read_varint(rest)
        if key & 7 == 0:
            found.setdefault(key >> 3, []).append(number)
        else:
            assert key & 7 == 2
            found.setdefault(key >> 3, []).append(bytes(rest[:number]))
            rest = rest[number:]
    return found


def at(written: bytes, *path: int) -> bytes:
    """Return the bytes of a field inside messages; empty where one is missing."""
    for number in path:
        found = fields(written).get(number, [b""])[0]
        assert isinstance(found, bytes)
        written = found
    return written


def entries(mapping: Mapping[str, str]) -> list[bytes]:
    """Write the values of a map field."""
    return [message({1: key, 2: value}) for key, value in mapping.items()]


def ttrpc(stream: int, kind: int, body: bytes) -> bytes:
    return pack(">IIBB", len(body), stream, kind, 0) + body


def frames(channel: int, data: bytes, sizes: Iterable[int] = ()) -> bytes:
    """Cut data into frames of these sizes; what is left is one frame."""
    written = b""
    for size in sizes:
        part, data = data[:size], data[size:]
        written += pack(">II", channel, len(part)) + part
    return written + pack(">II", channel, len(data)) + data


def _varint(value: int) -> bytes:
    written = b""
    while value > 0x7F:
        written += bytes([value & 0x7F | 0x80])
        value >>= 7
    return written + bytes([value])


def _read_varint(rest: memoryview) -> tuple[int, memoryview]:
    value = shift = 0
    while True:
        byte, rest = rest[0], rest[1:]
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, rest
