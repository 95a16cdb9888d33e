"""The pods that wait for their first try, by scheduling shape and in kube-scheduler's order.

They can be planned together (`joint_plan.py`). All waits for a change of pods or ledgers are here, too.
`PendingPods` follows the pods.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from kvplace.core.scalars import PodUid
from kvplace.kube.object_records import PodRecord


class WaitingPods:
    """An index of the pods, and the news about them."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[int, dict[PodUid, PodRecord]]] = {}
        """By shape and priority, in the order of their arrival."""
        self.arrived = 0
        """The number of pods that have begun to wait, ever."""
        self._news = asyncio.Event()

    def of_shape(self, shape: bytes) -> Iterator[PodRecord]:
        """Return the pods of a shape that wait for their first try: by priority, then the oldest first."""
        by_priority = self._waiting.get(shape, {})
        for priority in sorted(by_priority, reverse=True):
            yield from by_priority[priority].values()

    async def until_waiting(self, shape: bytes, count: int, *, quiet_s: float) -> None:
        """Wait until `count` pods of a shape wait, or no pod has come for `quiet_s`."""
        arrived, loop = self.arrived, asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(quiet_s) as patience:
                while sum(map(len, self._waiting.get(shape, {}).values())) < count:
                    await self.news()
                    if self.arrived > arrived:
                        arrived = self.arrived
                        patience.reschedule(loop.time() + quiet_s)

    async def news(self) -> None:
        """Wait until the watch brings a pod, or `wake` is called."""
        self._news.clear()
        await self._news.wait()

    def wake(self) -> None:
        """End every wait for news."""
        self._news.set()

    def pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        """Enter or remove a pod as it was and as it is now, and end every wait for news."""
        if after is not None and waits(after):
            self._waiting.setdefault(after.shape, {}).setdefault(after.priority, {})[after.uid] = after
            if before is None or not waits(before):
                self.arrived += 1
        if before is not None and (after is None or not waits(after) or _place(before) != _place(after)):
            by_priority = self._waiting.get(before.shape, {})
            waiting = by_priority.get(before.priority, {})
            waiting.pop(before.uid, None)
            if not waiting:
                by_priority.pop(before.priority, None)
            if not by_priority:
                self._waiting.pop(before.shape, None)
        self.wake()


def waits(pod: PodRecord) -> bool:
    """Whether a pod waits for its first try and may be planned with others.

    A refused pod comes again at an unknown time, after a change of the cluster. A pod with a nominated node
    is about to go there.
    """
    return bool(
        pod.shape
        and pod.request
        and not (pod.node or pod.nominated or pod.deleting or pod.was_tried)
        and pod.phase == "Pending"
    )


def _place(pod: PodRecord) -> tuple[bytes, int]:
    return pod.shape, pod.priority
