"""Frames and messages of an NRI connection as bytes, without a socket.

One unix stream carries two connections (github.com/containerd/nri, pkg/net/multiplex): on the one the
runtime calls the plugin, on the other the plugin calls the runtime. A frame has a header of 8 bytes, the
connection and the length of the payload. The payloads of a connection make up a stream of ttrpc messages
(github.com/containerd/ttrpc, PROTOCOL.md), each with a header of 10 bytes. All numbers are big endian.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from kvplace.core.errors import Unavailable

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Longest body of a message, in both directions."""
MAX_SENT_PAYLOAD_BYTES = 4096
"""A runtime that gets a longer frame stops answering: it reads into a buffer of this size."""

_FRAME = Struct(">II")
_MESSAGE = Struct(">IIBB")
_MAX_PAYLOAD_BYTES = MAX_MESSAGE_BYTES + _MESSAGE.size


class Channel(IntEnum):
    """The connections inside an NRI connection."""

    PLUGIN = 1
    """The runtime asks, the plugin answers."""
    RUNTIME = 2
    """The plugin asks, the runtime answers."""


class MessageType(IntEnum):
    """The types of ttrpc messages in unary calls."""

    REQUEST = 1
    RESPONSE = 2


_UNARY = frozenset(kind.value for kind in MessageType)


class BadPeer(Unavailable):
    """The other end does not speak NRI; the connection cannot be used any more."""


class Message(NamedTuple):
    """One ttrpc message."""

    channel: Channel
    stream: int
    """Ties a response to its request; each channel counts its own."""
    type: MessageType
    body: bytes


def write_message(message: Message) -> bytes:
    """Write a message as frames, none of them too long for the runtime; raises ValueError above the limit."""
    if len(message.body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(message.body)} bytes is longer than {MAX_MESSAGE_BYTES}")
    whole = memoryview(_MESSAGE.pack(len(message.body), message.stream, message.type, 0) + message.body)
    written = bytearray()
    for start in range(0, len(whole), MAX_SENT_PAYLOAD_BYTES):
        payload = whole[start : start + MAX_SENT_PAYLOAD_BYTES]
        written += _FRAME.pack(message.channel, len(payload))
        written += payload
    return bytes(written)


class FrameReader:
    """Turns received bytes into messages; keeps at most one unfinished message of each channel."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._streams: dict[int, bytearray] = {channel.value: bytearray() for channel in Channel}

    def receive(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete now; raises BadPeer for bytes that are not NRI."""
        self._received += data
        while len(self._received) >= _FRAME.size:
            number, length = _FRAME.unpack_from(self._received)
            if length > _MAX_PAYLOAD_BYTES:
                raise BadPeer(f"the NRI runtime sent a frame of {length} bytes, more than any message has")
            if len(self._received) < _FRAME.size + length:
                return
            payload = self._received[_FRAME.size : _FRAME.size + length]
            del self._received[: _FRAME.size + length]
            if number in self._streams:  # NRI's own multiplexer ignores other connections, too
                yield from self._messages(Channel(number), payload)

    def _messages(self, channel: Channel, payload: bytearray) -> Iterator[Message]:
        stream = self._streams[channel]
        stream += payload
        while len(stream) >= _MESSAGE.size:
            length, number, kind, _ = _MESSAGE.unpack_from(stream)
            if length > MAX_MESSAGE_BYTES:
                raise BadPeer(f"the NRI runtime sent a message of {length} bytes, above the limit")
            if kind not in _UNARY:
                raise BadPeer(f"the NRI runtime sent a message of type {kind}; NRI uses unary calls only")
            if len(stream) < _MESSAGE.size + length:
                return
            body = bytes(stream[_MESSAGE.size : _MESSAGE.size + length])
            del stream[: _MESSAGE.size + length]
            yield Message(channel, number, MessageType(kind), body)
