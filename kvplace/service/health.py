"""Liveness, readiness and metrics of a process, over plain HTTP on a port of their own.

The port is apart from the ones that do the work, so that a probe never waits behind a queue of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest


@dataclass(slots=True)
class Readiness:
    """Whether the process can serve: ready while there is no obstacle."""

    obstacle: str
    """One sentence for `/readyz`; empty when ready."""


def health_application(readiness: Readiness) -> web.Application:
    """Serve /healthz, /readyz and /metrics."""

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        obstacle = readiness.obstacle
        return web.Response(status=503 if obstacle else 200, text=f"{obstacle or 'ok'}\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes(
        [web.get("/healthz", alive), web.get("/readyz", ready), web.get("/metrics", metrics)]
    )
    return application
