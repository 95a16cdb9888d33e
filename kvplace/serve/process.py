"""`kvplace serve`: the extender, admission and the controller in one process on one event loop.

Puts the components together and has no rules of its own. Three listeners: the extender (TLS, client
certificate required), admission (TLS), and health with metrics (plain HTTP, read-only). On SIGTERM it becomes
unready, answers the requests under way, and ends. A claim that was stored without its binding is bound or
released by another replica or after the restart.

`serve` is ready from its first complete lists until its end, unless the API server is out of reach. That is
so when every watch has failed for a while: this replica then decides on old state, and another one may have
newer state. A single watch that fails does not make it unready. Its cause (a missing right, a broken kind) is
mostly the same for all replicas, and without a ready one admission refuses every VM that requests cores. With
a stale cache Filter is wrong more often, and Bind still asks the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from kvplace.admission.callers import Callers, PodAddresses
from kvplace.admission.http import VmiReader, admission_application
from kvplace.admission.objects import AdmissionSettings
from kvplace.controller.cluster import ControllerClient
from kvplace.controller.controller import Controller, ControllerSettings
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.events import EventRecorder, EventWriter
from kvplace.kube.session import open_session
from kvplace.kube.store import Store
from kvplace.nodes.node_cache import ClusterFreeBlocks, NodeCache, NodeClient, running_node_cache
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.extender import Extender, ExtenderSettings
from kvplace.scheduler.http import Routes
from kvplace.scheduler.listener import ALPN_PROTOCOLS, extender_listening
from kvplace.serve.metrics import ClusterGauges
from kvplace.service.connections import Address, ConnectionLimits
from kvplace.service.listening import RenewedTls, TlsFiles, listening
from kvplace.service.process import (
    Health,
    Readiness,
    health_application,
    in_background,
    log_as_json,
    run_until_signal,
    watch_loop,
)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of `kvplace serve`."""

    tls: TlsFiles
    """Certificate of the extender and of admission; CA and names of clients are for the extender alone.

    A client with a certificate of that CA and one of these names can bind pods.
    """
    admission: AdmissionSettings
    extender_address: Address
    admission_address: Address
    health_address: Address
    admission_client_ca: Path | None = None
    """Callers of admission must have a certificate of this CA; None: nothing needs one."""
    admission_client_names: tuple[str, ...] = ()
    """Names of callers of admission, one in each certificate; empty: any."""
    admission_client_namespaces: tuple[str, ...] = ("kube-system",)
    """Without that CA, pods may call admission in these namespaces only."""
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    kubeconfig: Path | None = None
    """None: the service account of the pod we run in, else the user's default kubeconfig."""
    extender: ExtenderSettings = field(default_factory=ExtenderSettings)
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    log_level: str = "info"


@dataclass(slots=True)
class ServeReadiness(Readiness):
    """Ready without an obstacle and while at least one watch works."""

    patience_s: float = 30.0
    """The longest failure of all watches; shorter than kube-scheduler's longest pause between attempts."""
    stores: Sequence[Store[Any, Any]] = field(default=())
    """The stores that decisions rest on."""

    def health(self) -> Health:
        """Return whether the replica can serve, and the fault."""
        if self.obstacle:
            return Health(False, self.obstacle)
        failing = [store for store in self.stores if store.failing_s >= self.patience_s]
        if not failing:
            return Health(True, "ok")
        shortest = min(failing, key=lambda store: store.failing_s)
        lasting = f"for {shortest.failing_s:.0f} s: {shortest.failure}"
        if len(failing) == len(self.stores):
            return Health(False, f"every watch of the API server has failed {lasting}")
        kinds = ", ".join(store.kind.name for store in failing)
        return Health(True, f"ok, but the view of {kinds} grows old; watching has failed {lasting}")


async def hang_up_while_unready(
    readiness: Readiness, hang_up: Callable[[], None], *, every_s: float = 1.0
) -> None:
    """End the connections of kube-scheduler whenever this replica cannot serve, until cancelled.

    A Service chooses among ready replicas only when a connection is opened. kube-scheduler keeps its own open
    and would always ask this replica.
    """
    while True:
        await asyncio.sleep(every_s)
        if not readiness.health().is_ready:
            hang_up()


class ServeClient(
    NodeClient, SchedulerClient, ControllerClient, VmiReader, PodAddresses, EventWriter, Protocol
):
    """The cluster calls of the components of `serve`."""


def run(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT; raises Misconfigured for errors that an operator must fix."""
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
        extender.pending.subscribe(controller.hold_ended)
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
                extender.pending.run(),
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
    # With a certificate every address may call.
    callers = Callers(cluster, settings.admission_client_namespaces)
    return listening(
        "admission",
        admission_application(cluster, settings.admission, lambda: cache.largest_node),
        settings.admission_address,
        tls.context,
        clients=settings.admission_client_names,
        may_connect=callers.may_call if settings.admission_client_ca is None else None,
        limits=settings.limits,
    )
