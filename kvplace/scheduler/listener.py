"""The connections of kube-scheduler: HTTP/2 or HTTP/1.1, as each TLS handshake negotiates (ALPN).

kube-scheduler offers HTTP/2 to an extender with TLS. Over HTTP/1.1 it keeps only two idle connections, so in
a burst nearly every bind starts with a TLS handshake, which costs both sides more than the rest of the bind.
The library h2 implements frames, HPACK, settings and flow control; aiohttp serves HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    UnknownFrameReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings

from kvplace.scheduler.extender_protocol import MAX_BODY
from kvplace.scheduler.http import ExtenderReply, Routes, extender_application
from kvplace.service.connections import Address, ConnectionLimits, Connections, accepting
from kvplace.service.listening import GRACE_S, http1_server, may_call

log = logging.getLogger(__name__)

MAX_STREAMS = 250
"""Calls at once on one connection; kube-scheduler opens another one for more."""
MAX_UNREAD = 4 * MAX_BODY
"""Bytes of incomplete calls on one connection."""
MAX_IDLE_FRAMES = 1_000
"""The most frames without progress of a call: PING, SETTINGS, RST_STREAM, PRIORITY, empty DATA, tiny
WINDOW_UPDATE. Each costs its receiver work, and its sender nearly nothing.
"""
IDLE_FRAMES_PER_ANSWER = 100
"""Idle frames that an answer makes up for; kube-scheduler sends a handful with a call."""
MIN_WINDOW_UPDATE = 1_024
"""Bytes of the smallest update that helps; Go gives back 4 KiB at once, unless a stream ends."""
_WINDOW = 1 << 20
"""Initial flow-control window of a stream; usual bodies are far smaller, so no update is sent."""
_PSEUDO_HEADERS = (b":method", b":path")
_CONFIGURATION = H2Configuration(
    client_side=False,
    header_encoding=None,
    # Of the headers only the method and the path are read, and both are found: others decide nothing.
    validate_inbound_headers=False,
    normalize_inbound_headers=False,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)


@dataclass(slots=True)
class _Call:
    """A call with a body that is still to come."""

    method: str
    path: str
    since: float
    body: bytearray = field(default_factory=bytearray)


class Http2Connection(asyncio.Protocol):
    """The server's end of one connection; answers every stream from `routes`."""

    def __init__(
        self,
        routes: Routes,
        ended: Callable[[Http2Connection], None],
        limits: ConnectionLimits | None = None,
    ) -> None:
        """`ended` is called when the connection is closed."""
        self._routes = routes
        self._ended = ended
        self._http = H2Connection(_CONFIGURATION)
        self._http.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
            },
        )
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, _Call] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._unsent: dict[int, memoryview] = {}
        self._all_sent = asyncio.Event()
        self._finishing = False
        self._limits = limits or ConnectionLimits()
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        """When a call or an answer last made progress."""
        self._unread = 0
        self._idle_frames = 0
        self._is_greeted = False

    async def finish(self) -> None:
        """Refuse further calls, answer the calls under way, and close the connection."""
        self._finishing = True
        while self._answering or self._unsent:  # the bodies of others may become complete meanwhile
            if self._answering:
                await asyncio.wait(self._answering)
            else:
                await self._all_sent.wait()
        if self._transport is not None:
            self._http.close_connection()
            self._send()
            self._close()

    def is_overdue(self, now: float) -> bool:
        """Return whether the caller is too slow; an idle connection is ended in the protocol's own way."""
        quiet_s = now - self._moved_at
        if (self._unsent or not self._is_greeted) and quiet_s > self._limits.request_s:
            return True
        if any(now - call.since > self._limits.request_s for call in self._calls.values()):
            return True
        if not self._answering and not self._unsent and quiet_s > self._limits.idle_s:
            self.hang_up()
        return False

    def hang_up(self) -> None:
        """Close the connection once the calls under way are answered."""
        if not self._finishing:
            self._ending = self._loop.create_task(self.finish())

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's classes
        self._http.initiate_connection()
        self._http.increment_flow_control_window(MAX_BODY)
        self._send()

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._http.receive_data(data):
                self._take(event)
        except ProtocolError as error:
            log.warning("HTTP/2 error on a connection to the extender: %s", error)
            self._send()
            self._close()
            return
        self._send_more()
        self._send()
        if (
            self._idle_frames > MAX_IDLE_FRAMES
            or self._unread > MAX_UNREAD
            or len(self._answering) > 2 * MAX_STREAMS
        ):
            self._end_abuse()

    def _end_abuse(self) -> None:
        """End the connection of a client that makes work without calls; calls in progress continue."""
        log.warning("a client of the extender sent a flood of frames over HTTP/2; its connection is closed")
        if self._transport is not None:
            self._http.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self._send()
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._calls.clear()
        self._unsent.clear()
        self._all_sent.set()
        self._unread = 0
        self._ended(self)

    # HTTP/2.

    def _take(self, event: Event) -> None:
        match event:
            case RequestReceived(stream_id=int(stream)) if self._finishing:
                # REFUSED_STREAM: nothing was processed, so the caller may try another replica.
                self._http.reset_stream(stream, ErrorCodes.REFUSED_STREAM)
            case RequestReceived(stream_id=int(stream), headers=headers):
                named = {bytes(name): bytes(value) for name, value in headers or ()}
                method, path = (named.get(name, b"").decode(errors="replace") for name in _PSEUDO_HEADERS)
                self._calls[stream] = _Call(method, path, self._loop.time())
                self._moved_at = self._loop.time()
            case DataReceived(stream_id=int(stream), data=data):
                self._http.acknowledge_received_data(event.flow_controlled_length or 0, stream)
                self._idle_frames += not data
                call = self._calls.get(stream)
                if call is None:
                    return
                call.body.extend(data or b"")
                self._unread += len(data or b"")
                if len(call.body) > MAX_BODY:
                    self._take_call(stream)
                    self._answer(stream, ExtenderReply.too_large())
                    if event.stream_ended is None:
                        self._http.reset_stream(stream, ErrorCodes.NO_ERROR)
            case StreamEnded(stream_id=int(stream)):
                call = self._take_call(stream)
                if call is not None:
                    task = self._loop.create_task(self._call(stream, call))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
            case StreamReset(stream_id=int(stream)):
                # A call that has started continues: a bind must not stop half-way.
                self._idle_frames += 1
                self._take_call(stream)
                self._unsent.pop(stream, None)
            case RemoteSettingsChanged():
                self._is_greeted = True
                self._idle_frames += 1
            case WindowUpdated(delta=int(delta)):
                self._idle_frames += delta < MIN_WINDOW_UPDATE
            case (
                PingReceived()
                | PriorityUpdated()
                | SettingsAcknowledged()
                | TrailersReceived()
                | UnknownFrameReceived()
            ):
                self._idle_frames += 1
            case ConnectionTerminated():
                self._close()

    def _take_call(self, stream: int) -> _Call | None:
        """Remove a call from the calls with a body still to come."""
        call = self._calls.pop(stream, None)
        if call is not None:
            self._unread -= len(call.body)
        return call

    async def _call(self, stream: int, call: _Call) -> None:
        reply = await self._routes(call.method, call.path, bytes(call.body))
        self._idle_frames = max(0, self._idle_frames - IDLE_FRAMES_PER_ANSWER)
        if self._transport is not None:
            self._answer(stream, reply)
            self._send()

    def _answer(self, stream: int, reply: ExtenderReply) -> None:
        headers = [
            (":status", str(reply.status)),
            ("content-type", reply.content_type),
            ("content-length", str(len(reply.body))),
        ]
        try:
            self._http.send_headers(stream, headers)
        except (StreamClosedError, ProtocolError):
            return  # the caller has closed the stream
        self._unsent[stream] = memoryview(reply.body)
        self._moved_at = self._loop.time()
        self._send_more()

    def _send_more(self) -> None:
        """Send as much of the answers as the caller's flow-control windows allow."""
        for stream, rest in list(self._unsent.items()):
            try:
                while True:
                    allowed = min(
                        self._http.local_flow_control_window(stream), self._http.max_outbound_frame_size
                    )
                    if allowed <= 0 < len(rest):
                        self._unsent[stream] = rest
                        break
                    part, rest = rest[:allowed], rest[allowed:]
                    self._moved_at = self._loop.time()
                    self._http.send_data(stream, part.tobytes(), end_stream=not rest)
                    if not rest:
                        del self._unsent[stream]
                        break
            except (StreamClosedError, ProtocolError):
                self._unsent.pop(stream, None)
        if self._unsent:
            self._all_sent.clear()
        else:
            self._all_sent.set()

    def _send(self) -> None:
        if self._transport is not None and (data := self._http.data_to_send()):
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


ALPN_PROTOCOLS = ("h2", "http/1.1")
"""Protocols that the TLS context offers, best first."""
_LIMITS = ConnectionLimits()


@contextlib.asynccontextmanager
async def extender_listening(
    routes: Routes,
    address: Address,
    tls: ssl.SSLContext | None,
    *,
    clients: Collection[str] = (),
    limits: ConnectionLimits = _LIMITS,
) -> AsyncIterator[tuple[Address, Connections]]:
    """Listen while the block runs; gives the address with the port that is used, and the connections.

    `clients` are the names that may call; empty: all that passed the handshake. The requests under way are
    answered before it ends. Raises Misconfigured if the address cannot be used.
    """
    over_http2: set[Http2Connection] = set()
    allowed = frozenset(clients)

    def choose(transport: asyncio.Transport) -> asyncio.Protocol | None:
        """Return the protocol that a connection has negotiated; None if its client may not call."""
        if not may_call(transport, allowed, "the extender"):
            return None
        tls_object = transport.get_extra_info("ssl_object")
        if tls_object is None or tls_object.selected_alpn_protocol() != "h2":
            return http1()
        connection = Http2Connection(routes, ended=over_http2.discard, limits=limits)
        over_http2.add(connection)
        return connection

    connections = Connections("extender", choose, limits)
    async with http1_server(extender_application(routes), connections, limits) as http1:
        try:
            async with accepting(connections, address, tls) as bound:
                log.info("extender is on %s", bound)
                yield bound, connections
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await asyncio.gather(*(connection.finish() for connection in list(over_http2)))
