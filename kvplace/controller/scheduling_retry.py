"""Making kube-scheduler retry waiting pods.

It does so when a node changes; otherwise it would take five minutes. So an annotation of a node is changed
after a release, when Filter no longer holds cores for a pod that has not taken them, and when the description
of a machine changes or is known before its node is; also at the start, since the process that ended may have
released cores and not come to it, and after this process could not follow the ledgers, since it may have
refused pods although another one had released cores.

While no pod waits, none is woken. But kube-scheduler may have tried a pod in vain that the watch has not
shown yet. So cores that were released while none waited are remembered, and causes one wake when the watch
shows the next pod that was tried in vain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Protocol

from prometheus_client import Counter

from kvplace.core.errors import Conflict, KvplaceError, Refused, Unavailable
from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import RELEASED_AT
from kvplace.kube.object_records import NodeRecord, PodRecord, TopologyRecord
from kvplace.nodes.node_cache import NodeCache

log = logging.getLogger(__name__)

WAKES = Counter("kvplace_controller_wakes_total", "How often waiting pods were retried.")

_RETRY_S = 0.5
"""Pause before an annotation that failed is tried again."""


class NodeAnnotator(Protocol):
    """The cluster calls of the waker."""

    async def annotate_node(self, node: NodeName, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a node; raises Refused if the node is gone."""
        ...


class SchedulingRetry:
    """Annotates one of the nodes where waiting pods may now fit."""

    def __init__(
        self,
        cluster: NodeAnnotator,
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
                    pause = max(pause, _RETRY_S)
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


def _is_refused(pod: PodRecord | None) -> bool:
    """Whether kube-scheduler has tried a pod and found no node."""
    return pod is not None and pod.was_tried and not pod.node
