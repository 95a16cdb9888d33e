"""Unary gRPC over one HTTP/2 connection, without a socket: bytes in, calls out, and back.

h2 does HTTP/2 itself (frames, HPACK, settings, flow control). This adds the layer of gRPC
(github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md): one message of five bytes and a body each way, and the status
in the trailers. Compression is refused, so that a small message cannot become a huge one.
"""

from __future__ import annotations

from typing import NamedTuple

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RequestReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError, StreamClosedError, StreamIDTooLowError
from h2.settings import SettingCodes, Settings

from kvplace.core.errors import GrpcStatus
from kvplace.core.protobuf import MAX_MESSAGE_BYTES

MAX_STREAMS = 8
_PREFIX_BYTES = 5
_MAX_SENTENCE_BYTES = 2000
_STATUS_OK = (":status", "200")
_CONTENT_TYPE = ("content-type", "application/grpc")
_ACCEPT_ENCODING = ("grpc-accept-encoding", "identity")
_GONE = (StreamClosedError, StreamIDTooLowError)
"""Errors of h2 about a stream that has ended or that the client has reset."""


class GrpcCall(NamedTuple):
    """A whole unary request."""

    stream: int
    path: str
    message: bytes


class Cancelled(NamedTuple):
    """The client no longer waits for an answer on this stream."""

    stream: int


class _IncomingCall(NamedTuple):
    path: str
    body: bytearray


class GrpcConnection:
    """The server's end of one connection."""

    def __init__(self) -> None:
        self._http = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self._http.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
            },
        )
        self._http.initiate_connection()
        self._requests: dict[int, _IncomingCall] = {}
        self._answers: dict[int, memoryview] = {}
        self.closed = False
        """No more calls or answers; send the rest of `output` and close."""

    def receive(self, data: bytes) -> list[GrpcCall | Cancelled]:
        """Process bytes from the client; a violation of HTTP/2 is answered and closes the connection."""
        if self.closed:
            return []
        try:
            events = self._http.receive_data(data)
            found = [call for event in events for call in self._handle(event)]
            self._send_answers()
        except ProtocolError:
            self.closed = True
            return []
        return found

    def output(self) -> bytes:
        """Return the bytes that must be sent to the client."""
        return self._http.data_to_send()

    def reply(self, stream: int, message: bytes) -> None:
        """Answer a call, as fast as the client's flow control allows."""
        if self.closed:
            return
        try:
            self._http.send_headers(stream, [_STATUS_OK, _CONTENT_TYPE, _ACCEPT_ENCODING])
        except _GONE:
            return
        self._answers[stream] = memoryview(b"\0" + len(message).to_bytes(4, "big") + message)
        self._send_answers()

    def fail(self, stream: int, status: GrpcStatus, sentence: str) -> None:
        """Answer a call with an error."""
        if self.closed:
            return
        headers = [_STATUS_OK, _CONTENT_TYPE, _ACCEPT_ENCODING, *_status(status, sentence)]
        self._end(stream, headers)

    def _handle(self, event: Event) -> list[GrpcCall | Cancelled]:
        match event:
            case RequestReceived():
                self._begin(event)
            case DataReceived():
                self._collect(event)
            case StreamEnded() if event.stream_id in self._requests:
                return self._complete(event.stream_id, self._requests.pop(event.stream_id))
            case StreamReset():
                self._requests.pop(event.stream_id, None)
                self._answers.pop(event.stream_id, None)
                return [Cancelled(event.stream_id)]
            case ConnectionTerminated():
                self.closed = True
            case _:
                pass
        return []

    def _begin(self, event: RequestReceived) -> None:
        headers = dict(event.headers)
        stream = event.stream_id
        if headers.get(b":method") != b"POST":
            self._end(stream, [(":status", "405"), ("allow", "POST")])
        elif not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            self._end(stream, [(":status", "415")])
        elif headers.get(b"grpc-encoding", b"identity") != b"identity":
            shown = headers[b"grpc-encoding"][:40].decode("ascii", "replace")
            self.fail(
                stream,
                GrpcStatus.UNIMPLEMENTED,
                f"compression {shown!r} is not supported; use identity",
            )
        else:
            self._requests[stream] = _IncomingCall(
                headers.get(b":path", b"").decode("ascii", "replace"), bytearray()
            )

    def _collect(self, event: DataReceived) -> None:
        stream = event.stream_id
        self._http.acknowledge_received_data(event.flow_controlled_length, stream)
        request = self._requests.get(stream)
        if request is None:
            return
        request.body.extend(event.data)
        if len(request.body) < _PREFIX_BYTES:
            return
        length = int.from_bytes(request.body[1:_PREFIX_BYTES], "big")
        if request.body[0] != 0:
            self._refuse(
                stream,
                GrpcStatus.UNIMPLEMENTED,
                "compressed messages are not supported",
            )
        elif length > MAX_MESSAGE_BYTES:
            self._refuse(
                stream,
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"the message of {length} bytes is above the limit of {MAX_MESSAGE_BYTES}",
            )
        elif len(request.body) > _PREFIX_BYTES + length:
            self._refuse(
                stream, GrpcStatus.UNIMPLEMENTED, "a unary call must have exactly one message, not more"
            )

    def _complete(self, stream: int, request: _IncomingCall) -> list[GrpcCall | Cancelled]:
        body = bytes(request.body)
        if len(body) < _PREFIX_BYTES or len(body) != _PREFIX_BYTES + int.from_bytes(
            body[1:_PREFIX_BYTES], "big"
        ):
            self.fail(stream, GrpcStatus.INTERNAL, "the call ended before its message was complete")
            return []
        return [GrpcCall(stream, request.path, body[_PREFIX_BYTES:])]

    def _refuse(self, stream: int, status: GrpcStatus, sentence: str) -> None:
        del self._requests[stream]
        self.fail(stream, status, sentence)

    def _end(self, stream: int, headers: list[tuple[str, str]]) -> None:
        """Answer with headers alone, and stop a client that is still sending."""
        try:
            self._http.send_headers(stream, headers, end_stream=True)
            self._http.reset_stream(stream, ErrorCodes.NO_ERROR)
        except _GONE:
            pass
        except ProtocolError:
            self.closed = True

    def _send_answers(self) -> None:
        """Send as much of each answer as the client's windows allow; the rest waits for a WINDOW_UPDATE."""
        for stream in list(self._answers):
            try:
                self._answers[stream] = rest = self._send_some(stream, self._answers[stream])
                if not rest:
                    del self._answers[stream]
                    self._http.send_headers(stream, _status(GrpcStatus.OK, ""), end_stream=True)
            except _GONE:
                self._answers.pop(stream, None)

    def _send_some(self, stream: int, rest: memoryview) -> memoryview:
        while rest:
            size = min(self._http.local_flow_control_window(stream), self._http.max_outbound_frame_size)
            if size <= 0:
                break
            self._http.send_data(stream, bytes(rest[:size]))
            rest = rest[size:]
        return rest


def _status(status: GrpcStatus, sentence: str) -> list[tuple[str, str]]:
    trailers = [("grpc-status", str(int(status)))]
    if sentence:
        raw = sentence.encode()[:_MAX_SENTENCE_BYTES]
        written = "".join(
            chr(byte) if 0x20 <= byte < 0x7F and byte != 0x25 else f"%{byte:02X}" for byte in raw
        )
        trailers.append(("grpc-message", written))
    return trailers
