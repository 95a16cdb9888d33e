"""The few calls of the container runtime interface that a benchmark makes, without a program for each."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, TrailersReceived

from kvplace.core.protobuf import bytes_field, read_bytes_fields


class CriClient:
    """Calls a container runtime; each call has a connection of its own."""

    def __init__(self, socket_path: Path) -> None:
        self._socket = str(socket_path)

    def create(self, sandbox: str, sandbox_config: bytes, name: str, image: str) -> str:
        """Create a container that sleeps; returns its id."""
        config = (
            bytes_field(1, bytes_field(1, name))
            + bytes_field(2, bytes_field(1, image))
            + bytes_field(3, "sleep")
            + bytes_field(3, "inf")
            + bytes_field(11, f"{name}.log")
        )
        request = bytes_field(1, sandbox) + bytes_field(2, config) + bytes_field(3, sandbox_config)
        return read_bytes_fields(self._call("CreateContainer", request))[1].decode()

    def start(self, container: str) -> None:
        self._call("StartContainer", bytes_field(1, container))

    def remove(self, container: str) -> None:
        """Stop it at once and remove it."""
        self._call("RemoveContainer", bytes_field(1, container))

    def _call(self, method: str, message: bytes) -> bytes:
        http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        http.initiate_connection()
        path = f"/runtime.v1.RuntimeService/{method}"
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        http.send_headers(1, [*headers, ("content-type", "application/grpc"), ("te", "trailers")])
        http.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._socket)
            answer = b""
            while True:
                connection.sendall(http.data_to_send())
                for event in http.receive_data(connection.recv(1 << 16)):
                    match event:
                        case DataReceived():
                            answer += event.data
                            http.acknowledge_received_data(event.flow_controlled_length, 1)
                        case ResponseReceived() | TrailersReceived():
                            found = {str(name): str(value) for name, value in event.headers}
                            if found.get("grpc-status", "0") != "0":
                                sys.exit(f"{method}: {found.get('grpc-message')}")
                        case StreamEnded():
                            return answer[5:]
                        case _:
                            pass


def sandbox_config(name: str, uid: str, cgroup_parent: str) -> bytes:
    """Write what CreateContainer repeats of a pod's sandbox."""
    metadata = bytes_field(1, name) + bytes_field(2, uid) + bytes_field(3, "default")
    return (
        bytes_field(1, metadata)
        + bytes_field(2, name)
        + bytes_field(3, f"/var/log/pods/default_{name}_{uid}")
        + bytes_field(8, bytes_field(1, cgroup_parent))
    )
