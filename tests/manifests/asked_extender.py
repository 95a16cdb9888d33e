"""An extender that notes its calls, and binds with kvplace serve's rights.

It takes the place of kvplace serve, with the operator's certificates; it accepts every node.
"""

from __future__ import annotations

import json
import queue
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from harness.control_plane.cluster import ControlPlane

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of kube-scheduler."""

    verb: str
    body: Json
    client: str
    """Common name of the client's certificate."""


@dataclass
class AskedExtender:
    """Answers Filter with all nodes, Preempt with no victims and Bind by binding; a context manager."""

    cluster: ControlPlane
    certificates: Path
    """The files that `make-certificates` made."""
    calls: queue.Queue[Call] = field(default_factory=queue.Queue)

    def __enter__(self) -> Self:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            self.certificates / "serve" / "tls.crt", self.certificates / "serve" / "tls.key"
        )
        context.load_verify_locations(self.certificates / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
        token = self.cluster.service_account_token("kvplace-system", "kvplace-serve")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, token))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        """Return where it listens."""
        return int(self._server.server_address[1])

    def bind(self, args: Json, token: str) -> None:
        """Bind a pod as kvplace serve does."""
        placement = json.dumps({"version": 1, "podUid": args["PodUID"], "node": args["Node"]})
        self.cluster.request(
            "POST",
            f"/api/v1/namespaces/{args['PodNamespace']}/pods/{args['PodName']}/binding",
            {
                "metadata": {
                    "name": args["PodName"],
                    "uid": args["PodUID"],
                    "annotations": {"kvplace.io/placement": placement},
                },
                "target": {"apiVersion": "v1", "kind": "Node", "name": args["Node"]},
            },
            token=token,
        )


def _handler(extender: AskedExtender, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert isinstance(self.connection, ssl.SSLSocket)
            client: Json = dict(self.connection.getpeercert() or {})
            names = [value for part in client["subject"] for key, value in part if key == "commonName"]
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            verb = self.path.rpartition("/")[2]
            answer: Json | list[Json] = {"NodeNames": body.get("NodeNames")}
            if verb == "prioritize":
                answer = [{"Host": node, "Score": 1} for node in body["NodeNames"]]
            if verb == "preempt":
                answer = {"NodeNameToMetaVictims": {}}
            if verb == "bind":
                extender.bind(body, token)
                answer = {"Error": ""}
            extender.calls.put(Call(self.path, body, names[0]))
            sent = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_request(self, *_: object) -> None:
            """State nothing."""

    return Handler
