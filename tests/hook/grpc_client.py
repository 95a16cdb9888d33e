"""A gRPC client for tests: h2 on the caller's side, over a socket or straight into a `GrpcConnection`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import unquote_to_bytes

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes, Settings

from harness.waiting import PATIENCE_S
from kvplace.core.protobuf import bytes_field, read_bytes_fields
from tests.hook.machine import DOMAIN, VMI

CALLBACKS = "/kubevirt.hooks.v1alpha3.Callbacks/"
INFO = "/kubevirt.hooks.info.Info/Info"
DEFINE = CALLBACKS + "OnDefineDomain"
HEADERS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("user-agent", "grpc-go/1.79.0"),
    ("te", "trailers"),
    ("grpc-timeout", "59999940u"),
)


def define(xml: bytes = DOMAIN, vmi: bytes = VMI) -> bytes:
    return bytes_field(1, xml) + bytes_field(2, vmi)


def domain_of(message: bytes) -> bytes:
    return read_bytes_fields(message)[1]


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


@dataclass
class Answer:
    """The answer on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int | None:
        return int(self.headers["grpc-status"]) if "grpc-status" in self.headers else None

    @property
    def sentence(self) -> str:
        return unquote_to_bytes(self.headers.get("grpc-message", "")).decode()

    @property
    def message(self) -> bytes:
        assert self.status == 0, self.sentence
        assert self.body[0] == 0
        assert int.from_bytes(self.body[1:5], "big") == len(self.body) - 5
        return bytes(self.body[5:])


class Caller:
    """The caller's end of one connection, without a socket."""

    def __init__(self, initial_window: int | None = None) -> None:
        self.http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        if initial_window is not None:
            values = {SettingCodes.INITIAL_WINDOW_SIZE: initial_window}
            self.http.local_settings = Settings(client=True, initial_values=values)
        self.http.initiate_connection()
        self.answers: dict[int, Answer] = {}
        self.terminated = False
        self.acknowledge = True
        self._unsent: dict[int, bytes] = {}

    def open(self, path: str, extra: Sequence[tuple[str, str]] = ()) -> int:
        stream = self.http.get_next_available_stream_id()
        self.answers[stream] = Answer()
        extra_names = {name for name, _ in extra}
        kept = [pair for pair in HEADERS if pair[0] not in extra_names]
        self.http.send_headers(stream, [*kept[:1], (":path", path), *kept[1:], *extra])
        return stream

    def call(self, path: str, message: bytes) -> int:
        """Send a whole call as fast as the server lets us."""
        stream = self.open(path)
        self.send(stream, framed(message))
        return stream

    def send(self, stream: int, body: bytes) -> None:
        self._unsent[stream] = body
        self._send_more()

    def receive(self, data: bytes) -> None:
        for event in self.http.receive_data(data):
            match event:
                case ResponseReceived() | TrailersReceived():
                    pairs = ((str(name), str(value)) for name, value in event.headers)
                    self.answers[event.stream_id].headers.update(pairs)
                case DataReceived():
                    self.answers[event.stream_id].body += event.data
                    if self.acknowledge:
                        self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case StreamEnded():
                    self.answers[event.stream_id].ended = True
                case StreamReset():
                    self.answers[event.stream_id].reset = int(event.error_code)
                    self._unsent.pop(event.stream_id, None)
                case ConnectionTerminated():
                    self.terminated = True
                case _:
                    pass
        self._send_more()

    def _send_more(self) -> None:
        for stream, rest in list(self._unsent.items()):
            while rest:
                room = min(self.http.local_flow_control_window(stream), self.http.max_outbound_frame_size)
                if room <= 0:
                    break
                self.http.send_data(stream, rest[:room])
                rest = rest[room:]
            self._unsent[stream] = rest
            if not rest:
                del self._unsent[stream]
                self.http.end_stream(stream)


class SocketCaller(Caller):
    """The caller's end on the hook's socket."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def flush(self) -> None:
        self.socket.sendall(self.http.data_to_send())

    def wait(self, stream: int) -> Answer:
        """Read until the stream has its whole answer."""
        answer = self.answers[stream]
        self.flush()
        while not answer.ended:
            data = self.socket.recv(1 << 16)
            assert data, f"the hook closed the connection; so far: {answer}"
            self.receive(data)
            self.flush()
        return answer

    def ask(self, path: str, message: bytes = b"") -> Answer:
        return self.wait(self.call(path, message))
