"""Admission registered with a real API server for some namespaces only, so that other tests do not notice.

The manifests are applied as they are, but for the address (loopback instead of a service), the name, and the
namespaces. The server runs in a thread; it keeps the objects that it was asked about.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from aiohttp.typedefs import Handler

from harness.control_plane.cluster import ControlPlane, RequestRefused
from kvplace.admission.http import admission_application, read_object, read_review
from tests.admission.reviewed_objects import SETTINGS

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
_API = "/apis/admissionregistration.k8s.io/v1"


class PlaneVmis:
    """Reads VMIs from the tests' API server."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.read: list[str] = []
        """The names that were asked for, in order."""

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        self.read.append(name)
        path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances/{name}"
        try:
            return await asyncio.to_thread(self._plane.request, "GET", path)
        except RequestRefused as refused:
            if refused.status != 404:
                raise
            return None


class Server:
    """The webhook addresses over TLS on loopback, in a thread of their own."""

    def __init__(self, plane: ControlPlane) -> None:
        self.asked: list[tuple[str, str, str]] = []
        """Kind, operation and name of every object that arrived, in order."""
        self.largest: int | None = None
        self.vmis = PlaneVmis(plane)
        certificate, key = plane.issue_certificate("kvplace-admission-tests")
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(certificate, key)
        self._plane = plane
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)

    async def _start(self) -> str:
        application = admission_application(self.vmis, SETTINGS, lambda: self.largest)
        application.middlewares.append(self._remember)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"https://{host}:{port}"

    async def _close(self) -> None:
        connections = list(self._runner.server.connections) if self._runner.server else []
        transports = [connection.transport for connection in connections]
        await self._runner.cleanup()
        for transport in transports:
            # The API server keeps its connections and does not answer a TLS goodbye.
            if transport is not None:
                transport.abort()
        await asyncio.sleep(0)

    @web.middleware
    async def _remember(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        review = read_review(await request.read())
        metadata = read_object(review.object, "object")["metadata"]
        name = metadata.get("name") or metadata.get("generateName")
        self.asked.append((review.kind.kind, review.operation, name))
        return await handler(request)

    def names(self, kind: str) -> list[str]:
        """Name the objects of a kind that arrived."""
        return [name for asked, _, name in self.asked if asked == kind]

    def stop(self) -> None:
        """End the server and its thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def registered(
    plane: ControlPlane, manifest: str, namespaces: Sequence[str], *, name: str, url: str = ""
) -> Iterator[None]:
    """Apply one file of manifests/ for these namespaces while the block runs, webhooks pointing to `url`."""
    where = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(namespaces)}
    with contextlib.ExitStack() as stack:
        for document in yaml.safe_load_all((MANIFESTS / manifest).read_text()):
            made = copy.deepcopy(document)
            made["metadata"]["name"] = name
            for webhook in made.get("webhooks", []):
                webhook["namespaceSelector"]["matchExpressions"].append(where)
                webhook["clientConfig"] = {
                    "url": f"{url}{webhook['clientConfig']['service']['path']}",
                    "caBundle": base64.b64encode(plane.ca_file.read_bytes()).decode(),
                }
            if "matchConstraints" in made.get("spec", {}):
                made["spec"]["matchConstraints"]["namespaceSelector"] = {"matchExpressions": [where]}
            if "policyName" in made.get("spec", {}):
                made["spec"]["policyName"] = name
            collection = f"{_API}/{document['kind'].lower().replace('policy', 'policie')}s"
            if document["kind"].endswith("Binding"):
                collection = f"{_API}/validatingadmissionpolicybindings"
            plane.request("POST", collection, made)
            stack.callback(plane.request, "DELETE", f"{collection}/{name}")
        yield
