"""Gauges of `serve` about the cluster, brought up to date when they are read.

One series exists for each node with an agent. All other series with the name of a node or pod exist only for
nodes and pods that need attention. The work over all nodes and claims is done in turns: see
`ClusterFreeBlocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from prometheus_client import Gauge

from kvplace.controller.controller import Controller
from kvplace.core.free_resources import BLOCK_LEVELS, BLOCK_SIZES
from kvplace.core.ledger import Claim
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import NodeName
from kvplace.kube.concurrency import Turns
from kvplace.kube.events import EventRecorder
from kvplace.nodes.node_cache import ClusterFreeBlocks, NodeCache
from kvplace.scheduler.extender import Extender
from kvplace.service.process import Series

NODES = Gauge(
    "kvplace_cluster_nodes", "Nodes by whether VMs can be placed on them: usable, unusable.", ["state"]
)
UNUSABLE = Series(
    Gauge("kvplace_cluster_unusable_node", "1 for each node where no VM can be placed.", ["node"])
)
ENFORCED = Series(
    Gauge(
        "kvplace_cluster_enforced_node",
        "1 for each node with an agent that keeps other containers off owned CPUs, by its NodeTopology.",
        ["node"],
    )
)
OVERLAPPING = Series(
    Gauge(
        "kvplace_cluster_overlapping_pod",
        "1 for each running pod on CPUs that another pod owns or that the kubelet has allocated.",
        ["node", "vm_namespace", "vm"],
    )
)
ALLOCATABLE = Gauge("kvplace_cluster_allocatable_cpus", "CPUs of usable nodes that VMs may get.")
FREE = Gauge("kvplace_cluster_free_cpus", "CPUs that an exclusive VM could get.")
CLAIMS = Gauge("kvplace_cluster_claims", "Claims in all ledgers.")
PODS = Gauge("kvplace_cluster_pods", "Pods that opted in: waiting, bound.", ["state"])
OLDEST_WAITING = Series(
    Gauge(
        "kvplace_cluster_oldest_waiting_pod_seconds",
        "Age of the oldest pod that requests cores and has no node; no series without one.",
        ["vm_namespace", "vm"],
    )
)
LARGEST_CPUS = Gauge(
    "kvplace_cluster_largest_free_block_cpus",
    "Most free CPUs inside one socket, NUMA node or L3 group of any node.",
    ["scope"],
)
LARGEST_CORES = Gauge(
    "kvplace_cluster_largest_free_block_cores",
    "Most whole free cores inside one socket, NUMA node or L3 group of any node.",
    ["scope"],
)
NODES_WITH_FREE_BLOCK = Gauge(
    "kvplace_cluster_nodes_with_free_block",
    "Nodes with that many free CPUs or more inside one socket, NUMA node or L3 group.",
    ["scope", "cpus"],
)
FRAGMENTATION = Gauge(
    "kvplace_cluster_fragmentation_ratio",
    "How much smaller the largest free blocks are than the free CPUs allow: 0 to 1.",
    ["scope"],
)
OLDEST_UNBOUND = Series(
    Gauge(
        "kvplace_ledger_oldest_unbound_claim_seconds",
        "Age of the oldest claim of an unbound pod; no series without one.",
        ["node", "vm_namespace", "vm"],
    )
)
WATCH_AGE = Gauge(
    "kvplace_watch_age_seconds",
    "Time since the API server was last heard about a kind, be it by a bookmark, which comes every minute.",
    ["kind"],
)
HOLDS = Gauge("kvplace_extender_holds", "Pods with cores that Filter holds until their Bind.")
BINDS_UNDER_WAY = Gauge("kvplace_extender_binds_under_way", "Binds that have begun and not ended.")
CONTROLLER_QUEUE = Gauge("kvplace_controller_queue_nodes", "Nodes with ledgers to check.")
EVENT_QUEUE = Gauge("kvplace_events_queue_length", "Events that are still to be written.")


class ClusterGauges:
    """Fills the gauges from the knowledge of one replica."""

    def __init__(
        self,
        cache: NodeCache,
        free_blocks: ClusterFreeBlocks,
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
        self._free_blocks = free_blocks

    async def refresh(self) -> None:
        """Bring every gauge up to date."""
        await self._free_blocks.refresh()
        self._fill_from_free_blocks()
        await self._look_at_claims()
        cache = self._cache
        for store in cache.watched:
            WATCH_AGE.labels(store.kind.name).set(store.silent_s)
        waiting = self._controller.waiting_pods
        PODS.labels("waiting").set(waiting)
        PODS.labels("bound").set(len(cache.pods.records) - waiting)
        oldest = self._controller.oldest_waiting_pod
        OLDEST_WAITING.update(
            {} if oldest is None else {(oldest.namespace, oldest.vm): self._age(oldest.created)}
        )
        OVERLAPPING.update(
            {(pod.node, pod.namespace, pod.vm): 1 for pod in self._controller.overlapping_pods}
        )
        HOLDS.set(self._extender.pending.number_held)
        BINDS_UNDER_WAY.set(len(self._extender.binder.under_way))
        CONTROLLER_QUEUE.set(self._controller.queue_length)
        EVENT_QUEUE.set(self._events.unwritten)

    def _fill_from_free_blocks(self) -> None:
        free_blocks = self._free_blocks.totals
        NODES.labels("usable").set(free_blocks.nodes)
        nodes = self._cache.nodes.records
        NODES.labels("unusable").set(max(0, len(nodes) - free_blocks.nodes))
        UNUSABLE.update({(node,): 1 for node in nodes if self._free_blocks.of(node) is None})
        ENFORCED.update(
            {
                (node,): 1
                for node, record in self._cache.topologies.records.items()
                if record.enforcement is not Enforcement.NONE and node in nodes
            }
        )
        ALLOCATABLE.set(free_blocks.allocatable)
        FREE.set(free_blocks.free)
        for domain in BLOCK_LEVELS:
            scope = domain.value
            LARGEST_CPUS.labels(scope).set(free_blocks.largest_cpus(domain))
            LARGEST_CORES.labels(scope).set(free_blocks.largest_cores(domain))
            FRAGMENTATION.labels(scope).set(free_blocks.fragmentation(domain))
            for size in BLOCK_SIZES:
                NODES_WITH_FREE_BLOCK.labels(scope, str(size)).set(free_blocks.nodes_with(domain, size))

    async def _look_at_claims(self) -> None:
        """Count the claims and find the oldest one of an unbound pod."""
        pods, count = self._cache.pods, 0
        oldest: tuple[str, NodeName, Claim] | None = None
        turns = Turns()
        for record in self._cache.ledgers.all():
            await turns.spend(1 + len(record.ledger.claims))
            for uid, claim in record.ledger.claims.items():
                count += 1
                pod = pods.get(uid)
                if claim.reserved is not None or (pod is not None and pod.node):
                    continue
                if oldest is None or claim.since < oldest[0]:
                    oldest = (claim.since, record.node, claim)
        CLAIMS.set(count)
        if oldest is None:
            OLDEST_UNBOUND.update({})
        else:
            since, node, claim = oldest
            OLDEST_UNBOUND.update({(node, claim.namespace, claim.vm): self._age(since)})

    def _age(self, since: str) -> float:
        """Return an age; 0 without a date, and for one of a foreign client that cannot be read."""
        try:
            return max(0.0, (self._now() - datetime.fromisoformat(since)).total_seconds())
        except (ValueError, TypeError):
            return 0.0
