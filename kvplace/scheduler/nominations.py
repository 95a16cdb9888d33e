"""Nominating the nodes of planned pods, so that kube-scheduler checks one node instead of thousands.

kube-scheduler tries `status.nominatedNodeName` first, and all other nodes only if that one fails. A
nomination is one more write to the API server for each pod, so it pays in large clusters only. It is a hint:
if it comes too late, or fails, only the cost changes. kube-scheduler gets its answer about a pod after the
nominations of the pods of its plan are written, so that few come too late. A pod that another client has
nominated or bound since it was planned stays as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from kvplace.core.errors import Conflict, KvplaceError
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.metrics import NOMINATIONS
from kvplace.scheduler.pending_pods import PendingPods, waits

log = logging.getLogger(__name__)

_AT_ONCE = 4
"""Concurrent nominations: enough to stay ahead of kube-scheduler, and few enough not to delay binds."""
_PATIENCE_S = 1.0
"""The longest delay of kube-scheduler's answer: a check of all nodes for every pod costs it more."""
_ATTEMPTS = 3
_WATCH_S = 0.5
"""The longest wait of a nomination until the watch brings a newer version of the pod."""


class Nominations:
    """Writes the nominations of planned pods, in kube-scheduler's order."""

    def __init__(
        self, cluster: SchedulerClient, cache: NodeCache, pending: PendingPods, *, from_nodes: int
    ) -> None:
        """Nominate in clusters of at least `from_nodes` nodes; 0: never."""
        self._cluster = cluster
        self._cache = cache
        self._pending = pending
        self._from_nodes = from_nodes
        self._due: asyncio.Queue[tuple[PodUid, NodeName]] = asyncio.Queue()

    @property
    def pay(self) -> bool:
        """Whether the cluster is so large that checking all nodes costs more than a nomination."""
        return 0 < self._from_nodes <= len(self._cache.nodes.records)

    def add(self, uid: PodUid, node: NodeName) -> None:
        """Nominate a node for a planned pod soon, if the cluster is large enough."""
        if self.pay:
            self._pending.nominate(uid, node)
            self._due.put_nowait((uid, node))

    async def written(self) -> None:
        """Wait until nothing is left to nominate, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._due.join()

    async def run(self) -> None:
        """Nominate until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(self._nominate_all())

    async def _nominate_all(self) -> None:
        while True:
            uid, node = await self._due.get()
            try:
                outcome = await self._write(uid, node)
            finally:
                self._due.task_done()
            NOMINATIONS.labels(outcome).inc()
            if outcome != "written" and self._pending.get(uid).nomination == node:
                self._pending.nominate(uid, None)

    async def _write(self, uid: PodUid, node: NodeName) -> str:
        """Nominate a node, and return the outcome once the watch has brought the nomination.

        KubeVirt writes the status of a pod right after it has created it. So a pod that has changed is tried
        again as it is now.
        """
        refusal: KvplaceError | None = None
        for _ in range(_ATTEMPTS):
            pod = self._cache.pods.get(uid)
            if pod is None or not waits(pod) or not self._is_due(uid, node):
                return "dropped"
            try:
                await self._cluster.nominate_node(pod, node)
            except Conflict as error:
                refusal = error
                await self._until_newer(pod)
            except KvplaceError as error:
                refusal = error
                break
            else:
                await self._until_newer(pod)
                return "written"
        log.info("node %s is not nominated: %s", node, refusal, extra={"uid": uid, "node": node})
        return "failed"

    async def _until_newer(self, pod: PodRecord) -> None:
        """Wait until the watch has brought a pod as it is now, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WATCH_S):
                while self._cache.pods.get(pod.uid) == pod:
                    await self._pending.news()

    def _is_due(self, uid: PodUid, node: NodeName) -> bool:
        """Whether a pod still goes to a node: by the plan, or by a claim that was stored along."""
        if self._pending.get(uid).nomination != node:
            return False
        return self._pending.planned_node(uid) == node or node in self._cache.ledgers.nodes_claimed_by(uid)
