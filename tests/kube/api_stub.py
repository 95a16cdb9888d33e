"""A small HTTP server that answers what a test asks it to, for what no real API server does on demand."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from kvplace.kube.credentials import CredentialOptions

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiStub:
    """Answers requests in the order of `script`, then with 500; keeps what it was asked."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.asked: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.gone = asyncio.Event()
        """Set when a client has hung up on a stream that `forever` keeps open."""
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        self.bodies.append(await request.read())
        answer = self.script.pop(0) if self.script else status(500, "nothing more is scripted")
        return await answer(request)

    def kubeconfig(self, folder: Path, *, ca_file: Path | None = None, **user: Any) -> CredentialOptions:
        """Write a kubeconfig for this server."""
        path = folder / "kubeconfig"
        trusted = {} if ca_file is None else {"certificate-authority": str(ca_file)}
        content = {
            "clusters": [{"name": "stub", "cluster": {"server": self.url, **trusted}}],
            "users": [{"name": "me", "user": user}],
            "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "me"}}],
            "current-context": "stub",
        }
        path.write_text(json.dumps(content))
        return CredentialOptions(kubeconfig=str(path))

    def forever(self, *lines: bytes) -> Answer:
        """Respond with a stream of these lines and then nothing, until the client hangs up."""

        async def answered(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            try:
                for line in lines:
                    await response.write(line)
                await asyncio.Event().wait()
            finally:
                self.gone.set()
            return response

        return answered


def status(code: int, message: str = "", *, retry_after: int | None = None, **details: Any) -> Answer:
    """Respond with a Status object, as the API server does for every error."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    body = {"kind": "Status", "status": "Failure", "code": code, "message": message, "details": details}

    async def answered(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=code, headers=headers)

    return answered


def answer(body: Any) -> Answer:
    """Respond with this JSON."""

    async def answered(_: web.Request) -> web.StreamResponse:
        return web.json_response(body)

    return answered


def closing(reply: Answer) -> Answer:
    """Respond and hang up, so that the next request needs a new connection."""

    async def answered(request: web.Request) -> web.StreamResponse:
        response = await reply(request)
        response.force_close()
        return response

    return answered


def lines(*chunks: bytes) -> Answer:
    """Respond with a stream of these chunks, cut as they are, and end it."""

    async def answered(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        return response

    return answered


def broken(*chunks: bytes) -> Answer:
    """Respond with a stream of these chunks and break the connection in mid-answer."""

    async def answered(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        assert request.transport is not None
        request.transport.abort()
        return response

    return answered


@asynccontextmanager
async def api_stub(tls: ssl.SSLContext | None = None) -> AsyncIterator[ApiStub]:
    """Run the server on loopback, with or without TLS."""
    stub = ApiStub()
    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", stub.handle)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    stub.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stub
    finally:
        await runner.cleanup()
