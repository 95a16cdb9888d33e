"""A cluster in memory that shows what bindings it was asked for."""

from __future__ import annotations

from collections.abc import Mapping

from kvplace.core.ledger import Ledger
from kvplace.core.placement import PodPlacement
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.records import PodRecord


class Counting(MemoryCluster):
    """A cluster that counts the bindings that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.bindings: list[tuple[str, str]] = []

    async def bind(
        self, namespace: str, pod: str, uid: str, node: str, annotations: Mapping[str, str]
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
