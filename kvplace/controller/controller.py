"""The loop that keeps ledgers true: it confirms, releases, restores and relocates claims.

Watch events only say which node to look at; the work compares the whole node. So a missed or doubled event
costs time, never correctness, and all nodes are looked at from time to time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from kvplace.controller.claim_action import has_ended
from kvplace.controller.pod_index import PodIndex
from kvplace.controller.reconciler import Reconciler, ReconcilerClient
from kvplace.controller.relocator import Relocator, RelocatorClient
from kvplace.controller.waker import NodeAnnotator, Waker
from kvplace.controller.work_queue import WorkQueue
from kvplace.core.errors import KvplaceError
from kvplace.core.scalars import NodeName
from kvplace.kube.events import EventRecorder
from kvplace.kube.records import NO_NODE, NodeRecord, PodRecord, TopologyRecord, VmiRecord
from kvplace.nodes.node_cache import NodeCache

log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Pause before a node whose reconciliation failed is tried again."""


class ControllerClient(ReconcilerClient, RelocatorClient, NodeAnnotator, Protocol):
    """What the controller asks of a cluster, apart from watches and ledger writes."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """How often and how patiently the controller works."""

    patience_s: float = 60.0
    """How long a claim may wait for its binding before its pod is read; far above a bind's limit."""
    round_s: float = 30.0
    """Time between two looks at every node."""
    wake_pause_s: float = 0.25
    """Least time between two wake-ups of waiting pods, so that many releases at once cause one."""
    confirm_s: float = 2.0
    """Delay before a claim is confirmed whose pod is bound as claimed; nothing waits for it."""
    spread_s: float = 0.2
    """Replicas start a node's work up to so much apart, each in its own order; the later find it done."""
    replica: str = ""
    """Name of this replica among the others; empty: the host's name."""


class Controller:
    """Watches pods, nodes and ledgers through the node cache and reconciles what differs."""

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
        self._queue = WorkQueue(replica=settings.replica or socket.gethostname(), spread_s=settings.spread_s)
        self._index = PodIndex(cache)
        self._waker = Waker(
            cluster,
            cache,
            any_waits=lambda: self._index.any_waits,
            pause_s=settings.wake_pause_s,
            now=now,
        )
        self.reconciler = Reconciler(
            cluster,
            cache,
            self._index,
            events,
            patience_s=settings.patience_s,
            now=now,
            released=self._waker.node_freed,
            look_again=lambda node, after_s: self._queue.add(node, after_s=after_s),
        )
        self.relocator = Relocator(
            cluster, cache, self._index, cache.edited_vmis, events, freed=self._waker.node_freed
        )
        self._pods = cache.pods
        cache.pods.subscribe(self._pod_seen)
        cache.nodes.subscribe(self._node_seen)
        cache.topologies.subscribe(self._report_seen)
        cache.edited_vmis.subscribe(self._vmi_seen)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work())
            group.create_task(self._rounds())
            group.create_task(self._waker.run())

    async def _work(self) -> None:
        """Reconcile the nodes that are due."""
        while True:
            due = await self._queue.take()
            await asyncio.gather(*(self._reconcile_or_retry(node) for node in due))

    async def _reconcile_or_retry(self, node: NodeName) -> None:
        try:
            await self.reconciler.reconcile(node)
            await self.relocator.relocate(node)
        except KvplaceError as error:
            log.warning("node %s is reconciled later: %s", node, error, extra={"node": node})
            self._queue.add(node, after_s=_RETRY_S)

    async def _rounds(self) -> None:
        """Make every node due that has a ledger or pods."""
        while True:
            self._index.forget_released()
            for node in {*(record.node for record in self._ledgers.all()), *self._index.nodes}:
                self._queue.add(node)
            await asyncio.sleep(self._settings.round_s)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        """Make the nodes due that a pod is bound to or has claims on; later if all is as it should be."""
        pod = after or before
        if pod is None:
            return
        claimed_on = self._ledgers.nodes_claimed_by(pod.uid)
        is_in_order = after is not None and not has_ended(after) and claimed_on == {after.node}
        nodes = {*claimed_on, pod.node, before.node if before is not None else NO_NODE}
        for node in nodes - {NO_NODE}:
            self._queue.add(node, after_s=self._settings.confirm_s if is_in_order else 0.0)

    def _report_seen(self, before: TopologyRecord | None, after: TopologyRecord | None) -> None:
        """Make a node due whose agent reports something new about its pods."""
        if after is not None and before is not None and after.pods != before.pods:
            self._queue.add(after.node)

    def _vmi_seen(self, _before: VmiRecord | None, after: VmiRecord | None) -> None:
        """Make the nodes of an edited VMI's pods due."""
        if after is not None:
            for pod in self._pods.records.values():
                if pod.vmi_uid == after.uid and pod.node:
                    self._queue.add(pod.node)

    def _node_seen(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        if after is None and before is not None:
            self._queue.add(before.name)
