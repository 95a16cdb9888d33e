"""Pods as releases before the native sidecar made them: the hook is an ordinary container.

A webhook after kvplace's own puts it back beside the container of QEMU. So everything else of such a pod is
made by today's programs.
"""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from harness.certificates import Authority
from harness.control_plane.cluster import ControlPlane

Json = dict[str, Any]

_CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_NAME = "zz-older-release"
"""The API server calls webhooks by the names of their configurations."""
_STAYS = "KVPLACE_STAYS_AFTER_SHUTDOWN"


@contextmanager
def older_release(plane: ControlPlane, namespace: str, folder: Path) -> Iterator[None]:
    """Make the pods that are created in a namespace meanwhile those of an older release."""
    authority = Authority(folder, "older-release")
    certificate, key = authority.issue("webhook")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Webhook)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    webhook = {
        "name": "older.kvplace.test",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        # kvplace's webhook sees the changed pod once more.
        "reinvocationPolicy": "IfNeeded",
        "clientConfig": {
            "url": f"https://127.0.0.1:{server.server_port}/",
            "caBundle": base64.b64encode(authority.file.read_bytes()).decode(),
        },
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
        ],
    }
    plane.request("POST", _CONFIGURATIONS, {"metadata": {"name": _NAME}, "webhooks": [webhook]})
    try:
        yield
    finally:
        plane.request("DELETE", f"{_CONFIGURATIONS}/{_NAME}")
        server.shutdown()
        server.server_close()
        thread.join()


class _Webhook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        patch = _back(review["request"]["object"]["spec"])
        answer: Json = {"uid": review["request"]["uid"], "allowed": True}
        if patch:
            answer |= {
                "patchType": "JSONPatch",
                "patch": base64.b64encode(json.dumps(patch).encode()).decode(),
            }
        body = json.dumps({**review, "request": None, "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log no request."""


def _back(spec: Json) -> list[Json]:
    """Move the hook to the containers, without the fields of a native sidecar."""
    patch: list[Json] = []
    for index, container in enumerate(spec.get("initContainers", [])):
        if container.get("command") == ["kvplace-hook"]:
            moved = {key: value for key, value in container.items() if key != "restartPolicy"}
            moved["env"] = [entry for entry in moved["env"] if entry["name"] != _STAYS]
            patch = [
                {"op": "remove", "path": f"/spec/initContainers/{index}"},
                {"op": "add", "path": "/spec/containers/-", "value": moved},
            ]
    return patch
