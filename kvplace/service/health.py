"""Liveness, readiness and metrics of a process, over plain HTTP on a port of their own.

The port is apart from the ones that do the work, so that a probe never waits behind a queue of requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvplace.service.metrics import READY


@dataclass(frozen=True, slots=True)
class Health:
    """An answer of `/readyz`."""

    is_ready: bool
    sentence: str


@dataclass(slots=True)
class Readiness:
    """Whether the process can serve: ready while there is no obstacle."""

    obstacle: str
    """One sentence for `/readyz`; empty when ready."""

    def health(self) -> Health:
        """Return whether the process can serve, or why not."""
        return Health(not self.obstacle, self.obstacle or "ok")


async def _nothing() -> None:
    """Prepare nothing."""


def health_application(
    process: str, readiness: Readiness, before_scrape: Callable[[], Awaitable[None]] = _nothing
) -> web.Application:
    """Serve /healthz, /readyz and /metrics of a process; `before_scrape` brings gauges up to date."""

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        health = readiness.health()
        return web.Response(status=200 if health.is_ready else 503, text=f"{health.sentence}\n")

    async def metrics(_: web.Request) -> web.Response:
        await before_scrape()
        READY.labels(process).set(readiness.health().is_ready)
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes(
        [web.get("/healthz", alive), web.get("/readyz", ready), web.get("/metrics", metrics)]
    )
    return application
