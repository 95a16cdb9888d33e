"""Telling people: events for the owner of a VM, written beside the work and each said once in a while."""

from __future__ import annotations

import asyncio
import logging

from kvplace.core.errors import KvplaceError
from kvplace.kube.cluster import Cluster
from kvplace.kube.records import EventRecord
from kvplace.scheduler.news import News

log = logging.getLogger(__name__)


class Telling:
    """Writes events without holding anybody up; one that is lost is only logged."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._news = News()
        self._talking: set[asyncio.Task[None]] = set()

    def tell(self, event: EventRecord) -> None:
        """Write an event soon, unless its object was told the same reason lately."""
        if not self._news.is_new((event.uid, event.reason)):
            return
        task = asyncio.get_running_loop().create_task(self._record(event))
        self._talking.add(task)
        task.add_done_callback(self._talking.discard)

    async def finish(self) -> None:
        """Wait until all events are written."""
        while self._talking:
            await asyncio.gather(*self._talking, return_exceptions=True)

    async def _record(self, event: EventRecord) -> None:
        try:
            await self._cluster.record_event(event)
        except KvplaceError as error:
            log.info("event lost: %s", error, extra={"uid": event.uid})
