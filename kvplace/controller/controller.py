"""The loop that keeps ledgers true: it releases, restores and relocates claims.

Watch events only state which node to check; the work compares the whole node. So a missed or doubled event
costs time, never correctness, and all nodes are checked from time to time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import heappop, heappush
from math import inf
from zlib import crc32

from prometheus_client import Counter

from kvplace.controller.claim_action import SETTLE_S, claim_of_bound_pod
from kvplace.controller.cluster import ControllerClient
from kvplace.controller.reconciler import Reconciler
from kvplace.controller.relocator import Relocator
from kvplace.core.errors import Conflict, KvplaceError, Refused, Unavailable
from kvplace.core.ledger import Claim
from kvplace.core.scalars import NO_CPUS, NodeName, PodUid
from kvplace.core.well_known_names import RELEASED_AT
from kvplace.kube.concurrency import Turns
from kvplace.kube.events import EventRecorder
from kvplace.kube.object_records import NO_NODE, NodeRecord, PodRecord, TopologyRecord, VmiRecord
from kvplace.nodes.node_cache import NodeCache

log = logging.getLogger(__name__)

WAKES = Counter("kvplace_controller_wakes_total", "How often waiting pods were retried.")

_RETRY_S = 1.0
"""Pause before a failed reconciliation of a node is tried again."""
_ANNOTATE_AGAIN_S = 0.5
"""Pause before an annotation that failed is tried again."""
_ADD_STEPS = 4
"""Steps of making a node due."""
_RECONCILE_STEPS = 2_000
"""Steps of the work for a node until it waits for the API server."""


class WorkQueue:
    """Nodes by their due time: each is in the queue once, with the earliest of its times.

    A node that becomes due while it is being worked on is taken again after that, never twice at once. Each
    replica adds a delay of its own for each node, from a hash of both names. So replicas seldom do the same
    work, and none needs to know how many others there are.
    """

    def __init__(self, *, replica: str, spread_s: float) -> None:
        """`spread_s` is the longest of these delays."""
        self._replica = replica
        self._spread_s = spread_s
        self._due: dict[NodeName, float] = {}
        self._order: list[tuple[float, NodeName]] = []
        """A heap that has the entries of `_due`, and some that have been replaced by earlier ones."""
        self._under_work: set[NodeName] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, node: NodeName, *, after_s: float = 0.0) -> None:
        """Make a node due after some seconds, unless it is due earlier."""
        share = crc32(f"{node} {self._replica}".encode()) / 0xFFFFFFFF
        due = asyncio.get_running_loop().time() + after_s + share * self._spread_s
        if due < self._due.get(node, inf):
            self._due[node] = due
            heappush(self._order, (due, node))
            self._changed.set()

    async def take(self) -> NodeName:
        """Wait until a node is due and remove it; it is worked on until `done` is called with it."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            while self._order and self._order[0][0] <= loop.time():
                due, node = heappop(self._order)
                if self._due.get(node) == due and node not in self._under_work:
                    del self._due[node]
                    self._under_work.add(node)
                    return node
            alarm = loop.call_at(self._order[0][0], self._changed.set) if self._order else None
            try:
                await self._changed.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()

    def done(self, node: NodeName) -> None:
        """Note that the work on a node has ended."""
        self._under_work.discard(node)
        if node in self._due:
            heappush(self._order, (self._due[node], node))
            self._changed.set()


class SchedulingRetry:
    """Makes kube-scheduler retry waiting pods, by an annotation of one node where they may now fit.

    kube-scheduler retries them when a node changes; otherwise it would take five minutes. So the annotation
    changes after a release, when Filter ends a hold without a bind, and when the description of a machine
    changes or is known before its node is. It also changes at the start, since the ended process may have
    released cores without a retry. And it changes after this process could not follow the ledgers, since it
    may have refused pods although another replica had released cores.

    No retry happens while no pod waits. But the watch may not have shown a refused pod yet. So released cores
    are remembered, and cause one retry when the watch shows the next refused pod.
    """

    def __init__(
        self,
        cluster: ControllerClient,
        cache: NodeCache,
        *,
        any_waits: Callable[[], bool],
        pause_s: float,
        now: Callable[[], datetime],
    ) -> None:
        """`any_waits` returns whether a pod has no node; `pause_s` is the least time between annotations."""
        self._cluster = cluster
        self._nodes = cache.nodes
        self._any_waits = any_waits
        self._pause_s = pause_s
        self._now = now
        self._freed: dict[NodeName, None] = {}
        """Where a pod may fit since the last wake; where it was released last stands last."""
        self._refused = 0
        """How many pods wait that kube-scheduler has tried in vain."""
        self._changed = asyncio.Event()
        self._topologies = cache.topologies
        cache.topologies.subscribe(self._topology_seen)
        cache.nodes.subscribe(self._node_seen)
        cache.pods.subscribe(self._pod_seen)
        self._freed.clear()  # topologies that were known before do not count
        self._changed.clear()
        if any_waits():  # since before we came: cores may have been released for them
            self.all_freed()

    def node_freed(self, node: NodeName) -> None:
        """Note that a pod may now fit on a node."""
        self._note(node)
        self._changed.set()

    def hold_ended(self, node: NodeName) -> None:
        """Note that a pod may now fit on a node that was refused while cores there were held for another one.

        Until one was refused none is woken: the other one may wait itself, for its disk for example.
        """
        self._note(node)
        if self._refused:
            self._changed.set()

    def all_freed(self) -> None:
        """Note that a pod may now fit on some unknown node."""
        self._freed |= dict.fromkeys(self._nodes.records)
        self._changed.set()

    async def run(self) -> None:
        """Wake waiting pods until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            pause = self._pause_s
            # One that is gone, or not there yet, is freed when it comes.
            self._freed = {node: None for node in self._freed if node in self._nodes.records}
            node = next(reversed(self._freed), None)
            if node is not None and self._any_waits():
                freed, self._freed = self._freed, {}
                if not await self._annotate(node):
                    self._freed = freed | self._freed
                    self._changed.set()
                    pause = max(pause, _ANNOTATE_AGAIN_S)
            await asyncio.sleep(pause)

    def _note(self, node: NodeName) -> None:
        self._freed.pop(node, None)
        self._freed[node] = None

    async def _annotate(self, node: NodeName) -> bool:
        """Annotate a node; returns False if it is worth another try."""
        try:
            await self._cluster.annotate_node(node, {RELEASED_AT: self._now().isoformat()})
        except (Conflict, Refused, Unavailable) as error:
            log.info("waiting pods are retried a little later: %s", error, extra={"node": node})
            return False
        except KvplaceError as error:
            log.warning("waiting pods were not retried: %s", error, extra={"node": node})
        else:
            WAKES.inc()
        return True

    def _topology_seen(self, before: TopologyRecord | None, after: TopologyRecord | None) -> None:
        if after is not None and (before is None or not after.allows_same_placements(before)):
            self.node_freed(after.node)

    def _node_seen(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        # kube-scheduler may have tried it before our watch reported it, and was refused.
        is_new = before is None and after is not None and after.name in self._topologies.records
        cpu_map = before.cpu_map if before is not None else ""
        if after is not None and (is_new or after.cpu_map != cpu_map):
            self.node_freed(after.name)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        self._refused += _is_refused(after) - _is_refused(before)
        if self._freed and _is_refused(after) and not _is_refused(before):
            self._changed.set()


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """How often and how patiently the controller works."""

    patience_s: float = 60.0
    """How long a claim may wait for its binding before its pod is read; far above a bind's limit."""
    round_s: float = 30.0
    """Time between two checks every node."""
    wake_pause_s: float = 0.25
    """Least time between two wake-ups of waiting pods, so that many releases at once cause one."""
    compare_s: float = 2.0
    """Delay before a claim is compared with the placement of a pod that is bound where it should be."""
    spread_s: float = 0.2
    """Replicas start a node's work up to so much apart, each in its own order; the later find it done."""
    replica: str = ""
    """Name of this replica among the others; empty: the host's name."""


class Controller:
    """Watches pods, nodes and ledgers through the node cache, and reconciles their differences."""

    def __init__(
        self,
        cluster: ControllerClient,
        cache: NodeCache,
        events: EventRecorder,
        settings: ControllerSettings | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        settings = settings or ControllerSettings()
        self._settings = settings
        self._ledgers = cache.ledgers
        self._watched_ledgers = cache.ledger_store
        self._outages = cache.ledger_store.outages
        """Outages of that watch that have led to a wake of waiting pods."""
        self._queue = WorkQueue(replica=settings.replica or socket.gethostname(), spread_s=settings.spread_s)
        self._cache = cache
        self._scheduling_retry = SchedulingRetry(
            cluster,
            cache,
            any_waits=lambda: bool(cache.pods_on(NO_NODE)),
            pause_s=settings.wake_pause_s,
            now=now,
        )
        self.reconciler = Reconciler(
            cluster,
            cache,
            events,
            patience_s=settings.patience_s,
            released=self._scheduling_retry.node_freed,
            look_again=lambda node, after_s: self._queue.add(node, after_s=after_s),
        )
        self.relocator = Relocator(
            cluster,
            cache,
            events,
            freed=self._scheduling_retry.node_freed,
            look_again=lambda node, after_s: self._queue.add(node, after_s=after_s),
        )
        self._pods = cache.pods
        self._reserved: dict[NodeName, frozenset[PodUid]] = {}
        """The pods with a reservation, by node."""
        cache.pods.subscribe(self._pod_seen)
        cache.nodes.subscribe(self._node_seen)
        cache.topologies.subscribe(self._report_seen)
        cache.edited_vmis.subscribe(self._vmi_seen)
        cache.ledgers.subscribe(self._ledger_seen)

    @property
    def waiting_pods(self) -> int:
        """How many pods that opted in have no node yet."""
        return len(self._cache.pods_on(NO_NODE))

    @property
    def oldest_waiting_pod(self) -> PodRecord | None:
        """The oldest of them; None where none waits."""
        waiting = self._cache.pods_on(NO_NODE)
        return min(waiting, key=lambda pod: (pod.created, pod.uid), default=None)

    @property
    def overlapping_pods(self) -> list[PodRecord]:
        """The running pods on CPUs that another pod owns or that the kubelet has allocated."""
        return self.reconciler.overlapping_pods

    @property
    def queue_length(self) -> int:
        """How many nodes are to be checked, now or soon."""
        return len(self._queue)

    def hold_ended(self, node: NodeName) -> None:
        """Have pods that were refused retried: cores of a node are no longer held for another one."""
        self._scheduling_retry.hold_ended(node)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work())
            group.create_task(self._rounds())
            group.create_task(self._scheduling_retry.run())

    async def _work(self) -> None:
        """Reconcile the nodes that are due, while others wait for the API server."""
        turns = Turns()
        async with asyncio.TaskGroup() as group:
            while True:
                node = await self._queue.take()
                await turns.spend(_RECONCILE_STEPS)
                group.create_task(self._reconcile_or_retry(node))

    async def _reconcile_or_retry(self, node: NodeName) -> None:
        """Do both parts of a node's work; a failure of the first does not stop the second."""
        try:
            for part in (self.reconciler.reconcile, self.relocator.relocate):
                try:
                    await part(node)
                except KvplaceError as error:
                    log.warning("node %s is reconciled later: %s", node, error, extra={"node": node})
                    self._queue.add(node, after_s=_RETRY_S)
        finally:
            self._queue.done(node)

    async def _rounds(self) -> None:
        """Make every node due that has a ledger or pods: at once, then each in its turn within a round."""
        spread_s = 0.0
        while True:
            self._wake_after_outage()
            self.reconciler.forget_gone()
            nodes = {*(record.node for record in self._ledgers.all()), *self._cache.nodes_with_pods}
            turns = Turns()
            for number, node in enumerate(nodes):
                await turns.spend(_ADD_STEPS)
                self._queue.add(node, after_s=spread_s * number / len(nodes))
            await asyncio.sleep(self._settings.round_s)
            spread_s = self._settings.round_s

    def _wake_after_outage(self) -> None:
        """Have waiting pods retried: they may have been refused while others' releases were not seen here."""
        outages = self._watched_ledgers.outages
        if self._watched_ledgers.failure is None and outages != self._outages:
            self._outages = outages
            self._scheduling_retry.all_freed()

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        """Make the nodes due that a pod is bound to or has claims on; later if all is as it should be."""
        pod = after or before
        if pod is None:
            return
        claimed_on = self._ledgers.nodes_claimed_by(pod.uid)
        is_in_order = after is not None and not after.has_ended and claimed_on == {after.node}
        nodes = {*claimed_on, pod.node, before.node if before is not None else NO_NODE}
        for node in nodes - {NO_NODE}:
            self._queue.add(node, after_s=self._settings.compare_s if is_in_order else 0.0)

    def _report_seen(self, before: TopologyRecord | None, after: TopologyRecord | None) -> None:
        """Make a node due when its agent reports something new about its pods, devices or kubelet's CPUs."""
        self.reconciler.report_seen(before, after)
        if after is None:
            return
        kubelet_cpus = before.kubelet_cpus if before is not None else NO_CPUS
        is_new = before is not None and (after.pods, after.devices) != (before.pods, before.devices)
        if after.kubelet_cpus != kubelet_cpus or is_new:
            self._queue.add(after.node)

    def _vmi_seen(self, _before: VmiRecord | None, after: VmiRecord | None) -> None:
        """Make the nodes of an edited VMI's pods due."""
        if after is not None:
            for pod in self._cache.pods_of_vmi(after.uid):
                if pod.node:
                    self._queue.add(pod.node)

    def _ledger_seen(self, node: NodeName) -> None:
        """Make a node due where a pod gets other cores, or something is reserved, and the ledger has lost the
        claim of a bound pod, or that has the claim of an unknown pod.

        The last after a while: a claim may be seen before its pod.
        """
        record = self._ledgers.current(node)
        claims: Mapping[PodUid, Claim] = record.ledger.claims if record is not None else {}
        if any(claim.relocation is not None or claim.reserved is not None for claim in claims.values()):
            self._queue.add(node)
        self._follow_reservations(node, claims)
        if any(uid not in self._pods.records for uid in claims):
            self._queue.add(node, after_s=SETTLE_S)
        lacking = (pod for pod in self._cache.pods_on(node) if pod.uid not in claims)
        if any(claim_of_bound_pod(pod) is not None for pod in lacking):
            self._queue.add(node)

    def _follow_reservations(self, node: NodeName, claims: Mapping[PodUid, Claim]) -> None:
        """Have waiting pods retried where any replica has given up a reservation."""
        before = self._reserved.pop(node, frozenset())
        now = frozenset(uid for uid, claim in claims.items() if claim.reserved is not None)
        if now:
            self._reserved[node] = now
        if before - claims.keys():
            self._scheduling_retry.node_freed(node)

    def _node_seen(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        if after is None and before is not None:
            self._queue.add(before.name)


def _is_refused(pod: PodRecord | None) -> bool:
    """Whether kube-scheduler has tried a pod and found no node."""
    return pod is not None and pod.was_tried and not pod.node
