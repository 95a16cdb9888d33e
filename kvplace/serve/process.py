"""`kvplace serve`: the extender, admission and the controller in one process on one event loop.

Puts the components together and has no rules of its own. Three listeners: the extender (TLS, client
certificate required), admission (TLS), and health with metrics (plain HTTP, read-only). On SIGTERM it becomes
unready, answers the requests under way, and ends. A claim that was stored without its binding is bound or
released by another replica or after the restart.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

from kvplace.admission.http import VmiReader, admission_application
from kvplace.controller.controller import Controller, ControllerClient
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.events import EventRecorder, EventWriter
from kvplace.kube.session import open_session
from kvplace.nodes.cluster_free_blocks import ClusterFreeBlocks
from kvplace.nodes.node_cache import NodeCache, NodeClient, running_node_cache
from kvplace.scheduler.extender import Extender, ExtenderClient
from kvplace.scheduler.http import Routes
from kvplace.scheduler.listener import ALPN_PROTOCOLS, extender_listening
from kvplace.serve.metrics import ClusterGauges
from kvplace.serve.readiness import ServeReadiness, hang_up_while_unready
from kvplace.serve.settings import ServeSettings
from kvplace.service.health import health_application, watch_loop
from kvplace.service.listening import listening
from kvplace.service.process import in_background, log_as_json, run_until_signal
from kvplace.service.settings import Address
from kvplace.service.tls import RenewedTls


class ServeClient(NodeClient, ExtenderClient, ControllerClient, VmiReader, EventWriter, Protocol):
    """The cluster calls of the components of `serve`."""


def run(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT; raises Misconfigured for what an operator must change."""
    log_as_json(settings.log_level)
    run_until_signal(_connected(settings))


@contextlib.asynccontextmanager
async def _connected(settings: ServeSettings) -> AsyncIterator[None]:
    session = await open_session(
        CredentialOptions(kubeconfig=str(settings.kubeconfig) if settings.kubeconfig else None)
    )
    cluster = ApiCluster(session)
    try:
        async with serving(settings, cluster):
            yield
    finally:
        await cluster.close()


@contextlib.asynccontextmanager
async def serving(settings: ServeSettings, cluster: ServeClient) -> AsyncIterator[dict[str, Address]]:
    """Serve while the block runs; enters when ready and gives the address of each listener by name."""
    extender_tls = RenewedTls(settings.tls, alpn=ALPN_PROTOCOLS)
    admission_tls = RenewedTls(replace(settings.tls, client_ca=settings.admission_client_ca))
    readiness = ServeReadiness("the cluster has not been read completely yet")
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        gauges: ClusterGauges | None = None

        async def before_scrape() -> None:
            if gauges is not None:
                await gauges.refresh()

        health = health_application("serve", readiness, before_scrape)
        health_address = await enter(
            listening("health", health, settings.health_address, limits=settings.limits)
        )
        cache = await enter(running_node_cache(cluster))
        readiness.stores = cache.stores
        events = EventRecorder(cluster)
        extender = Extender(cluster, cache, events, settings.extender)
        controller = Controller(cluster, cache, events, settings.controller)
        extender.holds.subscribe(controller.hold_ended)
        gauges = ClusterGauges(cache, ClusterFreeBlocks(cache), extender, controller, events)
        extender_address, schedulers = await enter(
            extender_listening(
                Routes(extender),
                settings.extender_address,
                extender_tls.context,
                clients=settings.tls.client_names,
                limits=settings.limits,
            )
        )
        addresses = {
            "health": health_address,
            "extender": extender_address,
            "admission": await enter(_admission_listening(settings, cluster, cache, admission_tls)),
        }
        await enter(
            in_background(
                controller.run(),
                extender.holds.run(),
                extender.nominations.run(),
                extender.room.run(),
                extender_tls.keep_renewed(),
                admission_tls.keep_renewed(),
                hang_up_while_unready(readiness, schedulers.hang_up),
                watch_loop(),
            )
        )
        await extender.describe_nodes()
        gc.freeze()  # the synced caches stay: full collections need not walk them again
        readiness.obstacle = ""
        try:
            yield addresses
        finally:
            readiness.obstacle = "stopping"
            await events.finish()


def _admission_listening(
    settings: ServeSettings, cluster: ServeClient, cache: NodeCache, tls: RenewedTls
) -> contextlib.AbstractAsyncContextManager[Address]:
    return listening(
        "admission",
        admission_application(cluster, settings.admission, lambda: cache.largest_node),
        settings.admission_address,
        tls.context,
        clients=settings.admission_client_names,
        limits=settings.limits,
    )
