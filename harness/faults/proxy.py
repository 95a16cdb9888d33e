"""A reverse proxy to the API server that fails as a script states.

TLS on both sides. The client that is to suffer the faults gets its address and CA in a kubeconfig; tests and
checks ask the API server itself. It runs on a thread of its own and serves every caller: tokens
pass through.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from harness.control_plane.cluster import ControlPlane
from harness.faults.script import (
    EVENT,
    After,
    Answer,
    Before,
    Cut,
    Delay,
    DropAnswer,
    ExpiredStream,
    Fault,
    OldVersion,
    Rule,
    Script,
    SlowBody,
    TornLine,
)
from harness.loop_thread import LoopThread, loop_thread
from kvplace.kube.session import Sockets

_PATH = re.compile(
    r"^/(?:api/[^/]+|apis/[^/]+/[^/]+)/(?:namespaces/[^/]+/(?=[^/]))?"
    r"(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>.+))?$"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_HOP_BY_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "te", "upgrade"}
_OLDEST = "1"


def verb_and_resource(method: str, path: str, *, watch: bool) -> tuple[str, str]:
    """Name a request in the words of RBAC; one that is about no resource has its path as resource."""
    found = _PATH.match(path)
    if found is None:
        return method.lower(), path
    named = bool(found["name"])
    if method == "GET":
        verb = "watch" if watch else "get" if named else "list"
    else:
        verb = _VERBS.get(method, method.lower())
    return verb, "/".join(part for part in (found["resource"], found["subresource"]) if part)


class FaultProxy:
    """The proxy, running."""

    def __init__(self, plane: ControlPlane, thread: LoopThread) -> None:
        self.script = Script()
        self.ca_file = plane.ca_file
        self._plane = plane
        self._thread = thread
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(*plane.issue_certificate("fault-proxy"))
        self._sockets = Sockets()
        self._connections: set[asyncio.Transport] = set()

    @contextlib.contextmanager
    def playing(self, *rules: Rule) -> Iterator[None]:
        """Play rules while the block runs."""
        self.script.play(rules)
        try:
            yield
        finally:
            self.script.play(())
            self.script.fault_ended()

    def kubeconfig(self, token: str, *, name: str, ca_file: Path | None = None) -> Path:
        """Write a kubeconfig that leads here."""
        return self._plane.kubeconfig_for(token, name=name, server=self.url, ca_file=ca_file or self.ca_file)

    def cut_all(self) -> None:
        """Cut every connection, as when a load balancer is replaced."""

        async def cut() -> None:
            for transport in list(self._connections):
                transport.abort()

        self._thread.do(cut())
        self.script.fault_ended()

    def show_certificate(self, certificate: tuple[Path, Path]) -> None:
        """Show another certificate in every handshake from now on."""

        async def load() -> None:
            self._tls.load_cert_chain(*certificate)

        self._thread.do(load())

    # Running

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._plane.tls, limit=0, socket_factory=self._sockets.open),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            auto_decompress=False,
        )
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.url = f"https://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        for transport in list(self._connections):
            transport.abort()
        await self._runner.cleanup()
        await self._session.close()
        await self._sockets.hang_up()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        self._connections.add(transport)
        self._connections = {one for one in self._connections if not one.is_closing()}
        watch = request.query.get("watch", "") in ("1", "true")
        verb, resource = verb_and_resource(request.method, request.path, watch=watch)
        fault = self.script.next_fault(verb, resource)
        body = await request.read()
        query = dict(request.query)
        match fault:
            case Before(action):
                await asyncio.to_thread(action)
                self.script.fault_ended()
                return _cut(transport)
            case Cut():
                return _cut(transport)
            case Answer():
                return _answer(fault)
            case Delay(seconds):
                await asyncio.sleep(seconds)
                self.script.fault_ended()
            case OldVersion():
                body = _with_oldest_version(body)
                if "resourceVersion" in query:
                    query["resourceVersion"] = _OLDEST
            case _:
                pass
        try:
            async with self._session.request(
                request.method,
                URL(f"{self._plane.url}{request.rel_url.raw_path}", encoded=True).with_query(query),
                data=body or None,
                headers={
                    name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP
                },
            ) as answer:
                if watch and answer.status == 200:
                    return await self._pass_on_watch(request, transport, resource, answer)
                return await self._pass_on(request, transport, fault, answer)
        except (aiohttp.ClientError, OSError):
            # To the caller it is as if the API server had hung up.
            return _cut(transport)

    async def _pass_on(
        self,
        request: web.BaseRequest,
        transport: asyncio.Transport,
        fault: Fault | None,
        answer: aiohttp.ClientResponse,
    ) -> web.StreamResponse:
        content = await answer.read()
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
        match fault:
            case After(action):
                await asyncio.to_thread(action)
                self.script.fault_ended()
                return _cut(transport)
            case DropAnswer():
                return _cut(transport)
            case SlowBody(pieces, pause_s):
                slow = web.StreamResponse(status=answer.status, headers=headers)
                await slow.prepare(request)
                size = max(1, -(-len(content) // pieces))
                for start in range(0, len(content), size):
                    await asyncio.sleep(pause_s)
                    await slow.write(content[start : start + size])
                self.script.fault_ended()
                return slow
            case _:
                return web.Response(status=answer.status, headers=headers, body=content)

    async def _pass_on_watch(
        self,
        request: web.BaseRequest,
        transport: asyncio.Transport,
        resource: str,
        answer: aiohttp.ClientResponse,
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
        await stream.prepare(request)
        try:
            async with contextlib.aclosing(_lines(answer.content)) as lines:
                async for line in lines:
                    match self.script.next_fault(EVENT, resource):
                        case Cut():
                            return _cut(transport)
                        case TornLine():
                            await stream.write(line[: len(line) // 2])
                            return _cut(transport)
                        case ExpiredStream():
                            await stream.write(_EXPIRED)
                            return stream
                        case Before(action):
                            await asyncio.to_thread(action)
                            self.script.fault_ended()
                            return _cut(transport)
                        case Delay(seconds):
                            await asyncio.sleep(seconds)
                            self.script.fault_ended()
                        case _:
                            pass
                    await stream.write(line)
            return stream
        finally:
            # The rest of the stream is of no use to any client.
            if answer.connection is not None and answer.connection.transport is not None:
                answer.connection.transport.abort()


@contextlib.contextmanager
def fault_proxy(plane: ControlPlane) -> Iterator[FaultProxy]:
    """Run a proxy to the API server while the block runs."""
    with loop_thread("fault-proxy") as thread:
        proxy = FaultProxy(plane, thread)
        thread.do(proxy.start())
        try:
            yield proxy
        finally:
            thread.do(proxy.stop())


_EXPIRED = (
    json.dumps(
        {
            "type": "ERROR",
            "object": {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": "too old resource version",
                "reason": "Expired",
                "code": 410,
            },
        }
    ).encode()
    + b"\n"
)


def _cut(transport: asyncio.Transport) -> web.Response:
    transport.abort()
    return web.Response()


def _answer(fault: Answer) -> web.Response:
    headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": f"an injected {fault.status}",
        "reason": fault.reason,
        "code": fault.status,
    }
    return web.json_response(status, status=fault.status, headers=headers)


def _with_oldest_version(body: bytes) -> bytes:
    if not body:
        return body
    content: dict[str, Any] = json.loads(body)
    if "resourceVersion" in content.get("metadata", {}):
        content["metadata"]["resourceVersion"] = _OLDEST
    return json.dumps(content).encode()


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield whole lines of any length, with their ends."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"
