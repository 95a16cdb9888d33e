"""Clients of the extender: one of HTTP/2 in the same process, and one call over a connection."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset

from kvplace.scheduler.http import ExtenderReply, Routes
from kvplace.scheduler.listener import Http2Connection
from kvplace.service.connections import ConnectionLimits

PSEUDO_HEADERS = ((":method", "POST"), (":scheme", "https"), (":authority", "kvplace"))


class Calls:
    """Routes that keep what they are asked and answer when the test lets them."""

    def __init__(self, answer: bytes = b"yes") -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        self.done: list[str] = []
        self.were_asked = asyncio.Event()
        self.were_done = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.answer = answer

    async def __call__(self, method: str, path: str, body: bytes) -> ExtenderReply:
        self.asked.append((method, path, body))
        self.were_asked.set()
        await self.may_answer.wait()
        self.done.append(path)
        self.were_done.set()
        return ExtenderReply(200, "application/json", self.answer)

    @property
    def verbs(self) -> dict[str, Any]:
        async def verb(body: bytes) -> ExtenderReply:
            return await self("POST", "/v1/filter", body)

        return {"/v1/filter": verb}

    @property
    def as_routes(self) -> Routes:
        return cast(Routes, self)


class Wire(asyncio.Transport):
    """A transport whose other end is an h2 client in the same process."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.sent += data

    def close(self) -> None:
        self.closed = True


class Client:
    """An h2 client of one connection."""

    def __init__(self, routes: Calls, limits: ConnectionLimits | None = None, *, greets: bool = True) -> None:
        self.wire = Wire()
        self.ended: list[Http2Connection] = []
        self.connection = Http2Connection(routes.as_routes, self.ended.append, limits)
        self.http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.http.initiate_connection()
        self.bodies: dict[int, bytes] = {}
        self.statuses: dict[int, str] = {}
        self.complete: set[int] = set()
        self.reset: dict[int, ErrorCodes | int | None] = {}
        self.connection.connection_made(self.wire)
        self.greeting = bytes(self.wire.sent)
        if greets:
            self.exchange()

    def ask(self, body: bytes, path: str | bytes = "/v1/filter") -> int:
        stream = self.http.get_next_available_stream_id()
        self.http.send_headers(stream, [*PSEUDO_HEADERS, (":path", path)], end_stream=not body)
        self.exchange()
        while body and stream not in self.reset:
            part, body = body[:16_384], body[16_384:]
            self.http.send_data(stream, part, end_stream=not body)
            self.exchange()
        return stream

    def exchange(self, *, acknowledge: bool = True) -> None:
        """Carry bytes to and fro until no client has more to state."""
        while True:
            out = self.http.data_to_send()
            if out:
                self.connection.data_received(out)
            back = bytes(self.wire.sent)
            self.wire.sent.clear()
            if not (out or back):
                return
            for event in self.http.receive_data(back):
                match event:
                    case ResponseReceived(stream_id=int(stream), headers=headers):
                        self.statuses[stream] = dict(cast(list[tuple[str, str]], headers))[":status"]
                    case DataReceived(stream_id=int(stream), data=bytes(data)):
                        self.bodies[stream] = self.bodies.get(stream, b"") + data
                        if acknowledge:
                            self.http.acknowledge_received_data(event.flow_controlled_length or 0, stream)
                    case StreamEnded(stream_id=int(stream)):
                        self.complete.add(stream)
                    case StreamReset(stream_id=int(stream)):
                        self.reset[stream] = event.error_code
                        self.complete.add(stream)

    async def until_complete(self, *streams: int) -> None:
        """Carry bytes until the streams have their answers; nothing else shows that a task is done."""
        while not self.complete.issuperset(streams):
            await asyncio.sleep(0)
            self.exchange()


async def over_http1(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Ask once as HTTP/1.1 does."""
    writer.write(b"POST /v1/filter HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
    return await reader.read()


async def over_http2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Ask once as HTTP/2 does; what has come until the connection is closed without an answer."""
    http = H2Connection(H2Configuration(client_side=True))
    http.initiate_connection()
    pseudo = [(":method", "POST"), (":path", "/v1/filter"), (":scheme", "https"), (":authority", "a")]
    http.send_headers(1, pseudo)
    http.send_data(1, b"{}", end_stream=True)
    answer = b""
    while True:
        writer.write(http.data_to_send())
        received = await reader.read(65536)
        if not received:
            return answer
        for event in http.receive_data(received):
            if isinstance(event, DataReceived):
                answer += event.data or b""
            elif isinstance(event, StreamEnded):
                return answer
