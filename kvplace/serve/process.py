"""The life of `kvplace serve`: start, listen, become ready, and end without leaving half a bind behind.

Three listeners: the extender (TLS, client certificate required), admission (TLS), and health with metrics
(plain, read-only, on a port of its own so that probes do not queue behind filters). On SIGTERM it is no
longer ready, answers what it has begun, then ends; a claim that was stored without its binding is
finished or given back by whoever comes next.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterator

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvplace.admission.http import admission_routes
from kvplace.admission.review import MAX_BODY_BYTES
from kvplace.controller.controller import Controller
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.cluster import Cluster
from kvplace.kube.credentials import Source
from kvplace.kube.session import open_session
from kvplace.scheduler.extender import Extender
from kvplace.scheduler.http import Routes
from kvplace.scheduler.listener import ALPN_PROTOCOLS, listening
from kvplace.scheduler.node_book import NodeBook, running_book
from kvplace.serve.settings import Address, ServeSettings
from kvplace.service.json_log import log_as_json
from kvplace.service.tls import RenewedTls

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 300.0
"""Closing an idle connection on kube-scheduler or the API server would cost them a TLS handshake."""
_PATIENCE_S = 10.0
"""How long the end waits for answers that have been begun; above a bind's limit."""


def run(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT; raises Misconfigured for what an operator must mend."""
    log_as_json(settings.log_level)
    try:
        asyncio.run(_run(settings))
    except BaseExceptionGroup as several:
        raise _first_told(several) from several


def _first_told(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error for a person among those of tasks that ended together; the group when there is none."""
    for error in several.exceptions:
        told = _first_told(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(told, KvplaceError):
            return told
    return several


async def _run(settings: ServeSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    session = await open_session(Source(kubeconfig=str(settings.kubeconfig) if settings.kubeconfig else None))
    cluster = ApiCluster(session)
    try:
        async with serving(settings, cluster):
            await stop.wait()
            log.info("ending: finishing what was begun")
    finally:
        await cluster.close()


@contextlib.asynccontextmanager
async def serving(settings: ServeSettings, cluster: Cluster) -> AsyncIterator[dict[str, Address]]:
    """Serve while the block runs; enters when ready, with the addresses really listened on by name."""
    tls = settings.tls
    for_extender = RenewedTls(tls.certificate, tls.key, tls.client_ca, alpn=ALPN_PROTOCOLS)
    for_admission = RenewedTls(tls.certificate, tls.key)
    readiness = _Readiness()
    health = _health_application(readiness)
    async with contextlib.AsyncExitStack() as stack:
        addresses = {"health": await _listen(stack, health, settings.health_address)}
        book = await stack.enter_async_context(running_book(cluster))
        readiness.book = book
        extender = Extender(cluster, book, settings.extender)
        controller = Controller(
            cluster, book.pods, book.nodes, book.topologies, book.ledgers, settings.controller
        )
        admission = web.Application(client_max_size=MAX_BODY_BYTES)
        admission.add_routes(
            admission_routes(cluster, settings.admission, largest_node=lambda: book.largest_node)
        )
        with _named_address(settings.extender_address) as (host, port):
            addresses["extender"] = Address(
                *await stack.enter_async_context(
                    listening(
                        Routes(extender),
                        host,
                        port,
                        for_extender.context,
                        keep_alive_s=_KEEP_ALIVE_S,
                        patience_s=_PATIENCE_S,
                    )
                )
            )
        addresses["admission"] = await _listen(
            stack, admission, settings.admission_address, for_admission.context
        )
        await stack.enter_async_context(
            _in_background(controller.run(), for_extender.keep_renewed(), for_admission.keep_renewed())
        )
        gc.freeze()  # what is synced stays: full collections need not walk it again
        readiness.serving = True
        log.info("serving: %s", ", ".join(f"{name} on {address}" for name, address in addresses.items()))
        try:
            yield addresses
        finally:
            readiness.serving = False
            await extender.finish_talking()


class _Readiness:
    def __init__(self) -> None:
        self.book: NodeBook | None = None
        self.serving = False

    @property
    def reason(self) -> str:
        """Why we are not ready; empty when we are."""
        if self.book is None or not self.book.ready:
            return "the cluster has not been read completely yet"
        return "" if self.serving else "not serving: starting or ending"


def _health_application(readiness: _Readiness) -> web.Application:
    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        reason = readiness.reason
        return web.Response(status=503 if reason else 200, text=f"{reason or 'ok'}\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes(
        [web.get("/healthz", alive), web.get("/readyz", ready), web.get("/metrics", metrics)]
    )
    return application


async def _listen(
    stack: contextlib.AsyncExitStack,
    application: web.Application,
    address: Address,
    tls: ssl.SSLContext | None = None,
) -> Address:
    runner = web.AppRunner(
        application, access_log=None, keepalive_timeout=_KEEP_ALIVE_S, shutdown_timeout=_PATIENCE_S
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    with _named_address(address):
        await web.TCPSite(runner, address.host, address.port, ssl_context=tls).start()
    host, port = runner.addresses[0][:2]
    return Address(host, port)


@contextlib.contextmanager
def _named_address(address: Address) -> Iterator[tuple[str, int]]:
    """Name the address when it cannot be listened on."""
    try:
        yield address.host, address.port
    except OSError as error:
        raise Misconfigured(f"cannot listen on {address}: {error.strerror or error}") from None


@contextlib.asynccontextmanager
async def _in_background(*work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run endless work beside the block; it ends with the block, and work that fails ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
