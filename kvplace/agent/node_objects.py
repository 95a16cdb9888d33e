"""The objects of this node: its pods, its ledger, its NodeTopology and its Node, each by a selector.

The watches are narrowed down by the API server, so an agent's cost does not grow with the cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvplace.agent.node_plan import ThisNode
from kvplace.agent.revisions import Revisions
from kvplace.core.errors import BadAnnotation
from kvplace.core.ledger import Ledger
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName
from kvplace.core.topology import Topology
from kvplace.kube.object_records import LedgerRecord, PodRecord, TopologyRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import LEDGERS, NAME_FIELD, NODE_FIELD, NODES, PODS, TOPOLOGIES, Selector

log = logging.getLogger(__name__)


class NodeObjects:
    """The stores of one agent, and the state of its node that follows from them."""

    def __init__(self, node: NodeName, topology: Topology) -> None:
        self.node = node
        self.pods = Store(PODS, Selector(fields={NODE_FIELD: node}))
        self.ledgers = Store(LEDGERS, Selector(fields={NAME_FIELD: node}))
        self.topologies = Store(TOPOLOGIES, Selector(fields={NAME_FIELD: node}))
        self.nodes = Store(NODES, Selector(fields={NAME_FIELD: node}))
        self._topology = topology
        self._kubelet_cpus = NO_CPUS
        self._observes_only = False
        self.revisions = Revisions(self._notify)
        self._listeners: list[Callable[[], None]] = []
        self.pods.subscribe(self._pod_seen)
        self.ledgers.subscribe(self._ledger_seen)

    @property
    def stores(self) -> tuple[Store[Any, Any], ...]:
        """The stores that must run."""
        return (self.pods, self.ledgers, self.topologies, self.nodes)

    @property
    def ledger(self) -> Ledger:
        """The newest known ledger; an empty one where there is none, or where it cannot be read."""
        record = self.ledgers.get(self.node)
        return record.ledger if record is not None else Ledger()

    @property
    def state(self) -> ThisNode:
        """The state of this moment."""
        return ThisNode(
            node=self.node,
            topology=self._topology,
            ledger=self.ledger,
            pods=self.revisions.now(),
            kubelet_cpus=self._kubelet_cpus,
            observes_only=self._observes_only,
            is_known=self.is_known,
        )

    @property
    def is_known(self) -> bool:
        """Whether the objects have been read once."""
        return all(store.has_synced for store in self.stores)

    async def wait_until_known(self) -> None:
        """Wait until the objects have been read once."""
        for store in self.stores:
            await store.wait_until_synced()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call the listener after each change of `state`."""
        self._listeners.append(listener)

    def machine_changed(self, topology: Topology, kubelet_cpus: CpuMask, *, observes_only: bool) -> None:
        """Take over the result of discovery."""
        before = (self._topology, self._kubelet_cpus, self._observes_only)
        self._topology, self._kubelet_cpus = topology, kubelet_cpus
        self._observes_only = observes_only
        if before != (topology, kubelet_cpus, observes_only):
            self._notify()

    def topology_record(self) -> TopologyRecord | None:
        """Return the stored NodeTopology of this node; None where there is none."""
        return self.topologies.get(self.node)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        if after is not None:
            self.revisions.seen(after.uid, None if after.is_terminal else _placement(after))
        elif before is not None:
            self.revisions.deleted(before.uid)

    def _ledger_seen(self, _before: LedgerRecord | None, _after: LedgerRecord | None) -> None:
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


def _placement(pod: PodRecord) -> PodPlacement | None:
    """Read the placement of a pod; None where it has none of its own that can be read."""
    if not pod.placement:
        return None
    try:
        found = PodPlacement.from_json(pod.placement)
    except BadAnnotation as error:
        log.warning("pod %s/%s: %s", pod.namespace, pod.name, error, extra={"uid": pod.uid})
        return None
    return found if found.pod_uid == pod.uid and found.node == pod.node else None
