"""Clusters in memory: one that counts bindings, and one whose requests arrive after their sender has died."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TypeVar

from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import LedgerRecord, PodRecord
from tests.kube.faulty_cluster import FaultyCluster

T = TypeVar("T")


class Counting(FaultyCluster):
    """A cluster that counts the bindings that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.bindings: list[tuple[str, str]] = []

    async def bind(
        self, namespace: str, pod: str, uid: PodUid, node: NodeName, annotations: Mapping[str, str]
    ) -> None:
        self.bindings.append((pod, node))
        await super().bind(namespace, pod, uid, node, annotations)

    def ledger(self, node: str) -> Ledger:
        record = self._ledgers.records.get(node)
        return record.ledger if record is not None else Ledger()

    def claimed_on(self, uid: str) -> list[str]:
        """The nodes where a pod has a claim, as the API server has it."""
        return sorted(one.node for one in self._ledgers.records.values() if uid in one.ledger.claims)

    def pod(self, name: str) -> PodRecord:
        return self._pods.records["default", name]

    def placement(self, name: str) -> PodPlacement:
        return PodPlacement.from_json(self.pod(name).placement)


class Network(Counting):
    """A cluster that carries out what was sent although the sender is dead."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: set[asyncio.Task[object]] = set()

    async def bind(
        self, namespace: str, pod: str, uid: PodUid, node: NodeName, annotations: Mapping[str, str]
    ) -> None:
        await self._deliver(super().bind(namespace, pod, uid, node, annotations))

    async def create_ledger(self, node: NodeName) -> LedgerRecord:
        return await self._deliver(super().create_ledger(node))

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        return await self._deliver(super().write_ledger(before, change))

    async def _deliver(self, call: Coroutine[object, object, T]) -> T:
        task = asyncio.create_task(call)
        self._sent.add(task)
        task.add_done_callback(self._arrived)
        return await asyncio.shield(task)

    def _arrived(self, task: asyncio.Task[object]) -> None:
        self._sent.discard(task)
        if not task.cancelled():
            task.exception()

    async def all_arrived(self) -> None:
        await asyncio.gather(*self._sent, return_exceptions=True)
