"""Gauges of `serve` about the cluster, brought up to date when they are read.

Their number does not grow with the cluster. What they take from every node and claim is done in slices: see
`ClusterHoles`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

from prometheus_client import Gauge

from kvplace.controller.controller import Controller
from kvplace.core.enforcement import Enforcement
from kvplace.core.holes import Domain
from kvplace.kube.events import EventRecorder
from kvplace.nodes.cluster_holes import SLICE_S, ClusterHoles
from kvplace.nodes.node_cache import NodeCache
from kvplace.scheduler.extender import Extender

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Sizes of holes by which nodes are counted, in CPUs."""

NODES = Gauge(
    "kvplace_cluster_nodes", "Nodes by whether VMs can be placed on them: usable, unusable.", ["state"]
)
ENFORCED = Gauge(
    "kvplace_cluster_enforced_nodes",
    "Nodes on which an agent keeps other containers off the CPUs that pods own, as it has said last.",
)
ALLOCATABLE = Gauge("kvplace_cluster_allocatable_cpus", "CPUs of usable nodes that VMs may get.")
FREE = Gauge("kvplace_cluster_free_cpus", "CPUs that an exclusive VM could get.")
CLAIMS = Gauge("kvplace_cluster_claims", "Claims in all ledgers.")
PODS = Gauge("kvplace_cluster_pods", "Pods that ask for cores: waiting, bound.", ["state"])
OLDEST_WAITING = Gauge(
    "kvplace_cluster_oldest_waiting_pod_seconds",
    "Age of the oldest pod that requests cores and has no node; 0 without one.",
)
LARGEST_CPUS = Gauge(
    "kvplace_cluster_largest_hole_cpus",
    "Most free CPUs inside one socket, NUMA node or L3 group of any node.",
    ["scope"],
)
LARGEST_CORES = Gauge(
    "kvplace_cluster_largest_hole_cores",
    "Most whole free cores inside one socket, NUMA node or L3 group of any node.",
    ["scope"],
)
NODES_WITH_HOLE = Gauge(
    "kvplace_cluster_nodes_with_hole",
    "Nodes with that many free CPUs or more inside one socket, NUMA node or L3 group.",
    ["scope", "cpus"],
)
FRAGMENTATION = Gauge(
    "kvplace_cluster_fragmentation_ratio",
    "How much smaller the largest holes of the nodes are than their free CPUs could form: 0 to 1.",
    ["scope"],
)
OLDEST_UNBOUND = Gauge(
    "kvplace_ledger_oldest_unbound_claim_seconds",
    "Age of the oldest claim whose pod is not bound; 0 without one.",
)
WATCH_AGE = Gauge(
    "kvplace_watch_age_seconds",
    "Time since the API server was last heard about a kind, be it by a bookmark, which comes every minute.",
    ["kind"],
)
HOLDS = Gauge("kvplace_extender_holds", "Pods for which Filter holds cores until their Bind.")
BINDS_UNDER_WAY = Gauge("kvplace_extender_binds_under_way", "Binds that have begun and not ended.")
CONTROLLER_QUEUE = Gauge("kvplace_controller_queue_nodes", "Nodes whose ledgers are to be looked at.")
EVENT_QUEUE = Gauge("kvplace_events_queue_length", "Events that are still to be written.")


class ClusterGauges:
    """Fills the gauges from what one replica knows."""

    def __init__(
        self,
        cache: NodeCache,
        holes: ClusterHoles,
        extender: Extender,
        controller: Controller,
        events: EventRecorder,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`now` is compared with the dates of claims."""
        self._cache = cache
        self._extender = extender
        self._controller = controller
        self._events = events
        self._now = now
        self._holes = holes

    async def refresh(self) -> None:
        """Bring every gauge up to date."""
        await self._holes.refresh()
        self._fill_from_holes()
        await self._look_at_claims()
        cache = self._cache
        for store in cache.watched:
            WATCH_AGE.labels(store.kind.name).set(store.silent_s)
        waiting = self._controller.waiting_pods
        PODS.labels("waiting").set(waiting)
        PODS.labels("bound").set(len(cache.pods.records) - waiting)
        OLDEST_WAITING.set(self._age(self._controller.waiting_since))
        HOLDS.set(len(self._extender.holds))
        BINDS_UNDER_WAY.set(len(self._extender.binder.under_way))
        CONTROLLER_QUEUE.set(self._controller.queue_length)
        EVENT_QUEUE.set(self._events.unwritten)

    def _fill_from_holes(self) -> None:
        holes = self._holes.totals
        NODES.labels("usable").set(holes.nodes)
        NODES.labels("unusable").set(max(0, len(self._cache.nodes.records) - holes.nodes))
        ENFORCED.set(
            sum(
                record.enforcement is not Enforcement.NONE and node in self._cache.nodes.records
                for node, record in self._cache.topologies.records.items()
            )
        )
        ALLOCATABLE.set(holes.allocatable)
        FREE.set(holes.free)
        for domain in Domain:
            scope = domain.value
            LARGEST_CPUS.labels(scope).set(holes.largest_cpus(domain))
            LARGEST_CORES.labels(scope).set(holes.largest_cores(domain))
            FRAGMENTATION.labels(scope).set(holes.fragmentation(domain))
            for size in _SIZES:
                NODES_WITH_HOLE.labels(scope, str(size)).set(holes.nodes_with(domain, size))

    async def _look_at_claims(self) -> None:
        """Count the claims and find the oldest one whose pod is not bound."""
        pods, count, oldest = self._cache.pods, 0, ""
        ends = time.perf_counter() + SLICE_S
        for record in self._cache.ledgers.all():
            for uid, claim in record.ledger.claims.items():
                count += 1
                pod = pods.get(uid)
                if claim.reserved is None and (pod is None or not pod.node):
                    oldest = min(oldest or claim.since, claim.since)
            if time.perf_counter() >= ends:
                await asyncio.sleep(0)
                ends = time.perf_counter() + SLICE_S
        CLAIMS.set(count)
        OLDEST_UNBOUND.set(self._age(oldest))

    def _age(self, since: str) -> float:
        """Return an age; 0 without a date, and for one of a foreign client that cannot be read."""
        try:
            return max(0.0, (self._now() - datetime.fromisoformat(since)).total_seconds())
        except (ValueError, TypeError):
            return 0.0
