"""A small gRPC server on a unix socket for tests: unary calls, and streams that stay open.

One thread serves each connection. A method answers with one message, or with an iterator of the messages of a
stream; the stream stays open after the last one, as a device plugin keeps it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded
from h2.exceptions import ProtocolError

Method = Callable[[bytes], bytes | Iterable[bytes]]
"""Answers the bytes of a request: with one message, or with the messages of a stream."""


class GrpcServer:
    """A server that runs until `stop`."""

    def __init__(self, path: Path, methods: Mapping[str, Method]) -> None:
        """Listen; `methods` by `/package.Service/Method`."""
        self._methods = methods
        self._listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it and its connections."""
        for one in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # stopped
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        http = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        http.initiate_connection()
        paths: dict[int, str] = {}
        bodies: dict[int, bytearray] = {}
        with contextlib.suppress(OSError, ProtocolError):
            connection.sendall(http.data_to_send())
            while data := connection.recv(65536):
                for event in http.receive_data(data):
                    match event:
                        case RequestReceived():
                            paths[event.stream_id] = str(dict(event.headers)[b":path"], "ascii")
                            bodies[event.stream_id] = bytearray()
                        case DataReceived():
                            bodies[event.stream_id] += event.data
                            http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                        case StreamEnded():
                            stream = event.stream_id
                            self._answer(http, stream, paths.pop(stream), bytes(bodies.pop(stream)[5:]))
                        case _:
                            pass
                connection.sendall(http.data_to_send())

    def _answer(self, http: H2Connection, stream: int, path: str, request: bytes) -> None:
        headers = [(":status", "200"), ("content-type", "application/grpc")]
        method = self._methods.get(path)
        if method is None:
            http.send_headers(stream, [*headers, ("grpc-status", "12")], end_stream=True)
            return
        answer = method(request)
        http.send_headers(stream, headers)
        messages = [answer] if isinstance(answer, bytes) else answer
        for message in messages:
            framed = b"\0" + len(message).to_bytes(4, "big") + message
            while framed:
                size = http.max_outbound_frame_size
                http.send_data(stream, framed[:size])
                framed = framed[size:]
        if isinstance(answer, bytes):
            http.send_headers(stream, [("grpc-status", "0")], end_stream=True)
