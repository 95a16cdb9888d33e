"""A cluster whose API server has been restored from a backup, as every watch reports when it begins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from kvplace.core.errors import Corrupt
from kvplace.kube.watches import EVERYTHING, Interrupted, Kind, Selector, WatchEvent
from tests.kube.faulty_cluster import FaultyCluster

K = TypeVar("K")
R = TypeVar("R")


class RestoredCluster(FaultyCluster):
    """States first that the past has changed, and then what there is now."""

    async def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        yield Interrupted(Corrupt("the history has gone back"))
        async for event in super().watch(kind, selector):
            yield event
