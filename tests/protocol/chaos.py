"""What can go wrong with a call or a watch, decided by a seed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import TypeVar

from kvplace.core.errors import Conflict, Unavailable
from kvplace.kube.watches import EVERYTHING, Kind, Selector, WatchEvent
from tests.kube.faults import FaultScript, Operation
from tests.kube.faulty_cluster import FaultyCluster

K = TypeVar("K")
R = TypeVar("R")

_READS = {Operation.READ_POD, Operation.READ_VMI, Operation.READ_LEDGER}
_SHARE_OF_FAULTS = 0.12


class Chaos(FaultScript):
    """Delays every call, and fails some: before their effect, after it, or as if sent twice."""

    def __init__(self, random: Random, check: Callable[[str], None]) -> None:
        """`check` is called after each effect with the name of the call."""
        super().__init__()
        self._random = random
        self._check = check
        self.calm = False
        """Whether calls are quick and succeed from now on."""

    @asynccontextmanager
    async def around(self, operation: Operation) -> AsyncIterator[None]:
        await asyncio.sleep(self.pause())
        fate = 1.0 if self.calm else self._random.random() / _SHARE_OF_FAULTS
        if fate < 0.4:
            raise Unavailable(f"{operation.value}: connection refused")
        yield
        self._check(operation.value)
        await asyncio.sleep(self.pause())
        if fate < 0.8:
            raise Unavailable(f"{operation.value}: the answer was lost")
        if fate < 1.0 and operation not in _READS:
            raise Conflict(f"{operation.value}: sent twice, and the second was refused")

    def pause(self) -> float:
        """How long something takes: mostly moments, sometimes seconds."""
        if self.calm:
            return 0.001
        return self._random.choice((0.0, 0.001, 0.01, 0.05, 0.3, 2.0))


class View(FaultyCluster):
    """The cluster as one process sees it: its watches lag behind, each in its own way."""

    def __init__(self, cluster: FaultyCluster, random: Random, chaos: Chaos) -> None:
        self.__dict__ |= cluster.__dict__
        self._random = random
        self._chaos = chaos

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        return self._late(super().watch(kind, selector))

    async def _late(self, events: AsyncIterator[WatchEvent[R]]) -> AsyncIterator[WatchEvent[R]]:
        async for event in events:
            if self._random.random() < 0.5:
                await asyncio.sleep(self._chaos.pause())
            yield event
