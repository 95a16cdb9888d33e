"""A wait for an object continues when its watch ends: API servers end those of slow clients and new CRDs."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from harness.certificates import Authority
from harness.control_plane.watching import wait_for

Json = dict[str, Any]
Answer = Callable[[BaseHTTPRequestHandler], None]
PODS = "/api/v1/pods"


def seen(version: str, phase: str) -> Json:
    return {
        "type": "MODIFIED",
        "object": {"metadata": {"name": "pod", "resourceVersion": version}, "status": {"phase": phase}},
    }


def stream(*parts: Json | bytes, ends: bytes = b"0\r\n\r\n") -> Answer:
    """Send events and end the watch, as the API server ends it unless `ends` is another end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for part in parts:
            sent = part if isinstance(part, bytes) else json.dumps(part).encode() + b"\n"
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(sent), sent))
        handler.wfile.write(ends)
        handler.close_connection = True

    return answer


def refuse(status: int) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Cut the connection without an answer."""
    handler.close_connection = True


EXPIRED = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}


class PlayedApiServer:
    """Answers one watch after the other as it is asked to, the last one for ever."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.versions: list[str] = []
        """The version from which each watch was wanted."""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.versions += parse_qs(urlsplit(handler.path).query)["resourceVersion"]
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        answer(handler)


@pytest.fixture
def api_server() -> PlayedApiServer:
    return PlayedApiServer()


@pytest.fixture
def plane(api_server: PlayedApiServer, tmp_path: Path) -> Iterator[Any]:
    """What a wait needs of a control plane."""
    authority = Authority(tmp_path, "ca")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            api_server.answer(self)

        def log_message(self, *_: Any) -> None:
            """Log no request."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("api-server"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    try:
        yield SimpleNamespace(
            url=f"https://127.0.0.1:{server.server_port}",
            tls=ssl.create_default_context(cafile=str(authority.file)),
            admin=SimpleNamespace(token="token"),
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def is_running(pod: Json) -> bool:
    return bool(pod["status"]["phase"] == "Running")


@pytest.mark.parametrize(
    ("ends", "continues_at"),
    [
        pytest.param(stream(), "0", id="it ends before an event"),
        pytest.param(stream(seen("7", "Pending")), "7", id="it ends after an event"),
        pytest.param(stream(seen("7", "Pending"), b'{"type"'), "7", id="it ends in a line"),
        pytest.param(stream(seen("7", "Pending"), b'{"type"', ends=b""), "7", id="it is cut in a line"),
        pytest.param(stream(seen("7", "Pending"), EXPIRED), "0", id="its version is too old"),
        pytest.param(refuse(410), "0", id="its version is too old from the beginning"),
        pytest.param(refuse(429), "0", id="the API server reads the collection first"),
        pytest.param(hang_up, "0", id="the connection is cut"),
    ],
)
def test_a_wait_continues_when_its_watch_ends(
    plane: Any, api_server: PlayedApiServer, ends: Answer, continues_at: str
) -> None:
    api_server.answers = [ends, ends, stream(seen("8", "Running"))]
    assert wait_for(plane, PODS, "pod", is_running)["metadata"]["resourceVersion"] == "8"
    assert api_server.versions == ["0", continues_at, continues_at]


def test_another_refusal_ends_a_wait_at_once(plane: Any, api_server: PlayedApiServer) -> None:
    api_server.answers = [refuse(403)]
    with pytest.raises(AssertionError, match="403"):
        wait_for(plane, PODS, "pod", is_running)
