"""The messages on an emulated machine's channel: a length, then a pickle.

Both ends run the same code, so a value arrives unchanged.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Protocol

_LENGTH = struct.Struct("!I")


class Stream(Protocol):
    """One end: a socket's file or a character device, without a buffer."""

    def read(self, size: int, /) -> bytes | None: ...
    def write(self, data: bytes, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Ready:
    """The machine takes calls now."""

    release: str
    """The kernel's, such as `6.1.0-56-amd64`."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call, with its arguments."""

    task: bytes
    """A pickle of (function, arguments, named arguments)."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a call."""

    value: bytes | None
    """A pickle of the function's result; None where it did not return."""
    failure: str
    output: str
    """Everything that the call wrote to its standard output and error."""


Message = Ready | Call | Answer


def send(stream: Stream, message: Message) -> None:
    """Write one message."""
    body = pickle.dumps(message)
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[stream.write(bytes(rest[:65536])) or 0 :]


def receive(stream: Stream) -> Message | None:
    """Read one message; None at the end of the stream."""
    length = _exactly(stream, _LENGTH.size)
    if length is None:
        return None
    body = _exactly(stream, *_LENGTH.unpack(length))
    message = None if body is None else pickle.loads(body)
    assert message is None or isinstance(message, Message)
    return message


def _exactly(stream: Stream, size: int) -> bytes | None:
    parts = []
    while size:
        part = stream.read(size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
