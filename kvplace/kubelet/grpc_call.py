"""One unary gRPC call to a server on a unix socket, each on a connection of its own.

The server is not trusted to answer in time, in HTTP/2, or within reason: a call has a deadline and its answer
a largest size, and everything else is one error. h2 does HTTP/2 itself.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import unquote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError

from kvplace.core.errors import Misconfigured, Unavailable

_PREFIX = 5
_READ_BYTES = 1 << 16
_WINDOW = 1 << 20
_MOST_SHOWN = 200


async def unary_call(
    socket: Path, method: str, request: bytes, *, deadline_s: float, most_bytes: int
) -> bytes:
    """Call `/package.Service/Method` and return the answer's message.

    Raises Misconfigured where the socket may not be opened, and Unavailable for all else that goes wrong.
    """
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                return await _exchange(reader, writer, _Answer(method, most_bytes), request)
            finally:
                writer.close()
    except TimeoutError:
        raise Unavailable(f"{socket} did not answer {method} in {deadline_s:g} s") from None
    except PermissionError as error:
        raise Misconfigured(f"{socket} may not be opened: {error.strerror}; run the agent as root") from None
    except OSError as error:
        raise Unavailable(f"{socket} does not answer: {error.strerror or error}") from None
    except ProtocolError as error:
        raise Unavailable(f"{socket} does not speak HTTP/2: {str(error)[:_MOST_SHOWN]}") from None
    except _BadAnswer as error:
        raise Unavailable(f"{socket}: {method}: {error}") from None


class _BadAnswer(Exception):
    """The answer is not one message of gRPC with the status OK."""


class _Answer:
    """The part of an answer that has arrived."""

    def __init__(self, method: str, most_bytes: int) -> None:
        self.method = method
        self._most_bytes = most_bytes
        self._body = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self.is_complete = False

    def handle(self, event: Event) -> None:
        match event:
            case ResponseReceived() | TrailersReceived():
                self._headers.update({bytes(name): bytes(value) for name, value in event.headers})
            case DataReceived():
                self._body += event.data
                if len(self._body) > self._most_bytes + _PREFIX:
                    raise _BadAnswer(f"the answer is longer than {self._most_bytes} bytes")
            case StreamEnded():
                self.is_complete = True
            case StreamReset() | ConnectionTerminated():
                raise _BadAnswer(f"the call was ended with the HTTP/2 error {event.error_code}")
            case _:
                pass

    def message(self) -> bytes:
        status = self._headers.get(b":status", b"")
        if status != b"200":
            raise _BadAnswer(f"the HTTP status is {_shown(status)}")
        if (grpc := self._headers.get(b"grpc-status", b"")) != b"0":
            sentence = unquote(_shown(self._headers.get(b"grpc-message", b"")))
            raise _BadAnswer(f"gRPC status {_shown(grpc) or 'missing'}: {sentence}".rstrip(": "))
        if len(self._body) < _PREFIX or self._body[0] != 0:
            raise _BadAnswer("the answer is not one message without compression")
        if int.from_bytes(self._body[1:_PREFIX], "big") != len(self._body) - _PREFIX:
            raise _BadAnswer("the answer is not as long as it states")
        return bytes(self._body[_PREFIX:])


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: _Answer, request: bytes
) -> bytes:
    http = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    http.initiate_connection()
    http.increment_flow_control_window(_WINDOW)
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", answer.method),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    http.send_headers(1, headers)
    http.send_data(1, b"\0" + len(request).to_bytes(4, "big") + request, end_stream=True)
    while not answer.is_complete:
        writer.write(http.data_to_send())
        await writer.drain()
        data = await reader.read(_READ_BYTES)
        if not data:
            raise _BadAnswer("the connection was closed before the answer was complete")
        for event in http.receive_data(data):
            answer.handle(event)
            if isinstance(event, DataReceived) and event.flow_controlled_length:
                http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
    return answer.message()


def _shown(raw: bytes) -> str:
    return raw[:_MOST_SHOWN].decode("ascii", "replace")
