"""One connection to an NRI runtime, over which both ends call each other; its frames and messages as bytes.

Calls from the runtime are answered one after the other, in their order: the runtime waits for each of them
anyway, and the plugin's state is then never older than the call. So a handler must not wait for a call
to the runtime.

One unix stream carries two connections (github.com/containerd/nri, pkg/net/multiplex): on the one the
runtime calls the plugin, on the other the plugin calls the runtime. A frame has a header of 8 bytes, the
connection and the length of the payload. The payloads of a connection make up a stream of ttrpc messages
(github.com/containerd/ttrpc, PROTOCOL.md), each with a header of 10 bytes. All numbers are big endian.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

from kvplace.core.errors import KvplaceError, Misconfigured, Unavailable
from kvplace.nri.messages import (
    BadPeer,
    PluginCall,
    read_call,
    read_result,
    write_call,
    write_failure,
    write_result,
)

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


SOCKET = Path("/var/run/nri/nri.sock")
"""Where containerd and CRI-O listen unless configured otherwise."""
_PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
_RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"
_UNIMPLEMENTED = 12
"""The gRPC status that makes NRI 0.12 fall back to StateChange."""
_READ_BYTES = 1 << 16
_WRITE_TIMEOUT_S = 10.0
"""A runtime that does not read its answers is gone."""


class UnknownMethod(Exception):
    """The runtime called a method that we do not have."""


class Connection:
    """A connection that is open until `serve` raises."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._waiting: set[asyncio.Future[Any]] = set()
        self._next_stream = 1
        self._closed_for: KvplaceError | None = None

    @classmethod
    async def open(cls, socket: Path) -> Connection:
        """Connect; raises Unavailable where no process listens and Misconfigured where we may not."""
        try:
            return cls(*await asyncio.open_unix_connection(socket))
        except PermissionError as error:
            raise Misconfigured(
                f"{socket} may not be opened: {error.strerror}; run the agent as root"
            ) from None
        except OSError as error:
            raise Unavailable(f"no NRI runtime answers at {socket}: {error.strerror}") from None

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Call the runtime while `serve` runs; raises CallFailed or Unavailable."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        answer: asyncio.Future[bytes] = self.future()
        self._calls[stream] = answer
        try:
            async with asyncio.timeout(timeout_s):
                body = write_call(PluginCall(_RUNTIME_SERVICE, method, payload), timeout_s)
                await self._send(Message(Channel.RUNTIME, stream, MessageType.REQUEST, body))
                return read_result(await answer)
        except TimeoutError:
            raise Unavailable(f"the NRI runtime did not answer {method} in {timeout_s:g} s") from None
        finally:
            del self._calls[stream]

    async def serve(self, answer: Callable[[PluginCall], Awaitable[bytes]]) -> None:
        """Answer the runtime's calls; raises Unavailable when the connection ends, and nothing else.

        `answer` returns the payload of a response, or raises UnknownMethod.
        """
        ended = Unavailable("the NRI runtime closed the connection")
        try:
            while data := await self._reader.read(_READ_BYTES):
                for message in self._frames.receive(data):
                    await self._handle(message, answer)
        except Unavailable as error:
            ended = error
        except OSError as error:
            ended = Unavailable(f"the connection to the NRI runtime broke: {error.strerror}")
        finally:
            self.close(ended)
        raise self._closed_for or ended

    def close(self, reason: KvplaceError) -> None:
        """End the connection; calls under way, futures and `serve` raise the reason."""
        if self._closed_for is None:
            self._closed_for = reason
        for future in tuple(self._waiting):
            if not future.done():
                future.set_exception(self._closed_for)
        self._writer.close()

    def future(self) -> asyncio.Future[Any]:
        """Make a future that raises when the connection ends."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._closed_for is not None:
            future.set_exception(self._closed_for)
        self._waiting.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: asyncio.Future[Any]) -> None:
        self._waiting.discard(future)
        if not future.cancelled():
            future.exception()  # nothing need wait for it any more

    async def _handle(self, message: Message, answer: Callable[[PluginCall], Awaitable[bytes]]) -> None:
        match message.channel, message.type:
            case Channel.PLUGIN, MessageType.REQUEST:
                body = await _response(read_call(message.body), answer)
                await self._send(Message(Channel.PLUGIN, message.stream, MessageType.RESPONSE, body))
            case Channel.RUNTIME, MessageType.RESPONSE:
                call = self._calls.get(message.stream)
                if call is not None and not call.done():  # otherwise it came too late
                    call.set_result(message.body)
            case channel, kind:
                raise BadPeer(f"the NRI runtime sent a {kind.name} on connection {channel.value}")

    async def _send(self, message: Message) -> None:
        """Send a message whole, so that no frames of another get between its own."""
        self._writer.write(write_message(message))
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await self._writer.drain()
        except TimeoutError:
            raise Unavailable(f"the NRI runtime has not read for {_WRITE_TIMEOUT_S:g} s") from None


async def _response(call: PluginCall, answer: Callable[[PluginCall], Awaitable[bytes]]) -> bytes:
    try:
        if call.service != _PLUGIN_SERVICE:
            raise UnknownMethod
        return write_result(await answer(call))
    except UnknownMethod:
        return write_failure(_UNIMPLEMENTED, f"{call.service}/{call.method} is not implemented")
