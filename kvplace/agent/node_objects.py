"""The objects of this node (pods, ledger, NodeTopology, Node) and the revisions that its pods follow.

Each is selected by the API server, so an agent's cost does not grow with the cluster.

`Revisions` has one record for each pod with a placement: the revision that this node has carried out. To the
check of threads a new revision is one more reason for a thread on wrong CPUs. Until the revision is
confirmed, the pod's containers may use its old and its new cores; the pod owns both. A revision that cannot
be carried out is given up: the previous placement is in effect again, and `serve` writes it as the next
revision. After a restart of the agent the ledger has the previous placement, or shows that the relocation is
over.

A pod may be deleted by force while its QEMU runs. Its record stays until its containers have ended, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvplace.agent.node_plan import PodRevisions, ThisNode
from kvplace.core.errors import BadAnnotation
from kvplace.core.ledger import Ledger
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
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


class Revisions:
    """The records; calls a listener after each change that a plan depends on."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._pods: dict[PodUid, PodRevisions] = {}
        self._deleted: set[PodUid] = set()
        """Pods with a placement that are not in the API server any more."""

    def now(self) -> Mapping[PodUid, PodRevisions]:
        """Return the records of this moment by UID."""
        return dict(self._pods)

    def of(self, uid: PodUid) -> PodRevisions | None:
        """Return the record of a pod; None where it has no placement, or has ended."""
        return self._pods.get(uid)

    def seen(self, uid: PodUid, newest: PodPlacement | None) -> None:
        """Take over the placement of a pod in the API server; None where it has none, or has ended."""
        self._deleted.discard(uid)
        before = self._pods.get(uid)
        if newest is None:
            self._forget([uid])
        elif before is None:
            self._put(uid, PodRevisions(newest))
        elif newest != before.newest:
            self._put(uid, before.with_newest(newest))

    def deleted(self, uid: PodUid) -> None:
        """Note that a pod is not in the API server any more."""
        if uid in self._pods:
            self._deleted.add(uid)
            self._changed()

    def forget_deleted(self, here: Iterable[PodUid]) -> None:
        """Forget deleted pods, except pods with containers that are still `here`."""
        if self._deleted:
            self._forget(self._deleted.difference(here))

    def succeeded(self, uid: PodUid, placement: PodPlacement) -> None:
        """Note that every thread of a pod was seen where a placement states: its cpusets narrow to it."""
        before = self._pods.get(uid)
        if before is not None:
            revision = before.confirmed if before.failure else placement.revision
            self._put(uid, replace(before, followed=placement, confirmed=revision))

    def failed(self, uid: PodUid, revision: int, why: str, ledger: Ledger) -> None:
        """Give a revision of a pod up, unless there is a newer one or nothing to go back to.

        Where the one before is the same placement, its cpusets leave the CPUs of before all the same: threads
        that the VM sets anew again and again keep no more than its own CPUs.
        """
        before = self._pods.get(uid)
        previous = None if before is None else before.previous(ledger)
        if before is None or previous is None:
            return
        if revision != before.newest.revision or revision <= before.confirmed:
            return
        if previous.placement == before.newest.placement:
            self._put(uid, replace(before, confirmed=revision))
            return
        log.warning("revision %d is undone: %s", revision, why, extra={"uid": uid})
        self._put(uid, replace(before, failure=why))

    def _put(self, uid: PodUid, record: PodRevisions) -> None:
        if self._pods.get(uid) != record:
            self._pods[uid] = record
            self._changed()

    def _forget(self, uids: Iterable[PodUid]) -> None:
        gone = [uid for uid in uids if uid in self._pods or uid in self._deleted]
        for uid in gone:
            self._deleted.discard(uid)
            self._pods.pop(uid, None)
        if gone:
            self._changed()
