"""The cluster as the controller sees it: its calls, and the pods that opted in by node and VM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import NO_NODE, Condition, LedgerRecord, PodRecord
from kvplace.kube.watches import Kind, Selector
from kvplace.nodes.node_cache import NodeCache

K = TypeVar("K")
R = TypeVar("R")


class ControllerClient(Protocol):
    """The cluster calls of the controller, apart from watches and ledger writes."""

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        """Read a pod as the API server has it now; None if there is none."""
        ...

    async def read_all(self, kind: Kind[K, R], selector: Selector) -> tuple[R, ...]:
        """Read the selected objects of a kind as the API server has them now."""
        ...

    async def delete_ledger(self, before: LedgerRecord) -> None:
        """Delete a ledger that still equals `before`; raises Conflict if it does not, or has owners."""
        ...

    async def replace_placement(
        self, namespace: str, pod: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Write the next revision of a pod's placement.

        Raises Refused if the pod is gone, and Conflict if the revision does not follow the stored one.
        """
        ...

    async def request_cpus(self, pod: PodRecord, millicores: int) -> None:
        """Change the CPU request of the container with QEMU of a VM's pod; raises Refused or Forbidden."""
        ...

    async def set_pod_condition(self, pod: PodRecord, condition: Condition) -> None:
        """Set one condition of a pod; raises Refused if the pod is gone."""
        ...

    async def annotate_node(self, node: NodeName, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a node; raises Refused if the node is gone."""
        ...


class PodIndex:
    """Follows the pods of the node cache."""

    def __init__(self, cache: NodeCache) -> None:
        self._pods = cache.pods
        self._ledgers = cache.ledgers
        self._by_node: dict[NodeName, set[PodUid]] = {}
        self._by_vmi: dict[str, set[PodUid]] = {}
        self._deleted: set[PodUid] = set()
        cache.pods.subscribe(self._pod_seen)

    @property
    def nodes(self) -> list[NodeName]:
        """The nodes that have pods."""
        return [node for node in self._by_node if node]

    @property
    def any_waits(self) -> bool:
        """Whether a pod has no node yet."""
        return NO_NODE in self._by_node

    @property
    def waiting(self) -> int:
        """How many pods have no node yet."""
        return len(self._by_node.get(NO_NODE, ()))

    @property
    def oldest_waiting(self) -> PodRecord | None:
        """The pod that has been without a node for the longest time; None where none waits."""
        return min(self.on_node(NO_NODE), key=lambda pod: (pod.created, pod.uid), default=None)

    def on_node(self, node: NodeName) -> list[PodRecord]:
        """Return the pods that are bound to a node; for `NO_NODE` the waiting ones."""
        found = (self._pods.get(uid) for uid in self._by_node.get(node, ()))
        return [pod for pod in found if pod is not None]

    def of_vmi(self, uid: str) -> list[PodRecord]:
        """Return the pods of a VM: more than one while it live-migrates."""
        found = (self._pods.get(pod) for pod in self._by_vmi.get(uid, ()))
        return [pod for pod in found if pod is not None]

    def was_deleted(self, uid: PodUid) -> bool:
        """Whether a pod was deleted that had a claim."""
        return uid in self._deleted

    def forget_released(self) -> None:
        """Forget the deleted pods that have no claim any more."""
        self._deleted = {uid for uid in self._deleted if self._ledgers.nodes_claimed_by(uid)}

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        if before is not None:
            _discard(self._by_node, before.node, before.uid)
            _discard(self._by_vmi, before.vmi_uid, before.uid)
            if after is None and self._ledgers.nodes_claimed_by(before.uid):
                self._deleted.add(before.uid)
        if after is not None:
            self._by_node.setdefault(after.node, set()).add(after.uid)
            if after.vmi_uid:
                self._by_vmi.setdefault(after.vmi_uid, set()).add(after.uid)


def _discard(index: dict[K, set[PodUid]], key: K, uid: PodUid) -> None:
    here = index.get(key, set())
    here.discard(uid)
    if not here:
        index.pop(key, None)
