"""The pods that wait for their first try, by scheduling shape, in kube-scheduler's order.

Only a pod that kube-scheduler has not tried yet is sure to be tried soon. One that was tried and refused
comes again when something changes, at an unknown time, and one with a nominated node is about to go there.

In a large cluster the first pod of a plan costs kube-scheduler a check of thousands of nodes. Pods that
are planned beside it, and nominated, cost it one node each. VMs of a rollout arrive some dozens a second. So
the first pod of a stream waits a moment for others (`Gathering`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from kvplace.core.scalars import PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.kube.store import Store

STREAM_S = 1.0
"""A pod that comes so long after the one before comes alone, and does not wait for others."""
GATHER_S = 0.25
"""How long a pod waits for others at most: at thirty pods a second for seven of them."""
QUIET_S = 0.1
"""When no pod has come for so long, the stream has ended."""


class WaitingPods:
    """Follows the pods of the node cache."""

    def __init__(self, pods: Store[PodUid, PodRecord]) -> None:
        self._by_shape: dict[bytes, dict[int, dict[PodUid, PodRecord]]] = {}
        """Pods by shape and priority, in the order of their arrival."""
        self._added = asyncio.Event()
        self.arrived = 0
        """How many pods have begun to wait, ever."""
        pods.subscribe(self._pod_seen)

    def of_shape(self, shape: bytes) -> Iterator[PodRecord]:
        """Return the waiting pods of a shape: the highest priority first, then the oldest."""
        by_priority = self._by_shape.get(shape, {})
        for priority in sorted(by_priority, reverse=True):
            yield from by_priority[priority].values()

    async def until(self, shape: bytes, count: int, *, quiet_s: float) -> None:
        """Wait until so many pods of a shape wait, or no pod has come for `quiet_s`."""
        with contextlib.suppress(TimeoutError):
            while sum(map(len, self._by_shape.get(shape, {}).values())) < count:
                self._added.clear()
                async with asyncio.timeout(quiet_s):
                    await self._added.wait()

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        if after is not None and waits(after):
            self._by_shape.setdefault(after.shape, {}).setdefault(after.priority, {})[after.uid] = after
            self._added.set()
            if before is None or not waits(before):
                self.arrived += 1
        if before is not None and (after is None or not waits(after) or _place(before) != _place(after)):
            self._remove(before)

    def _remove(self, pod: PodRecord) -> None:
        by_priority = self._by_shape.get(pod.shape, {})
        waiting = by_priority.get(pod.priority, {})
        waiting.pop(pod.uid, None)
        if not waiting:
            by_priority.pop(pod.priority, None)
        if not by_priority:
            self._by_shape.pop(pod.shape, None)


class Gathering:
    """Notices pods that come in a stream, and has the first of them wait for some more."""

    def __init__(self, waiting: WaitingPods) -> None:
        self._waiting = waiting
        self._last = float("-inf")
        self._arrived = 0

    async def gather(self, shape: bytes, enough: int) -> None:
        """Wait until `enough` pods of a shape wait, if and while pods come in a stream, not for long.

        Where none has come since the last time, all pods of a rollout are there already.
        """
        loop = asyncio.get_running_loop()
        if self._waiting.arrived > self._arrived and loop.time() - self._last < STREAM_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._waiting.until(shape, enough, quiet_s=QUIET_S)
        self._last = loop.time()
        self._arrived = self._waiting.arrived


def waits(pod: PodRecord) -> bool:
    """Whether a pod waits for its first try and may be planned with others."""
    return bool(
        pod.shape
        and pod.request
        and not (pod.node or pod.nominated or pod.deleting or pod.was_tried)
        and pod.phase == "Pending"
    )


def _place(pod: PodRecord) -> tuple[bytes, int]:
    return pod.shape, pod.priority
