"""The cluster as the controller sees it: its calls, and the pods that opted in by node and VM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvplace.core.ledger import Ledger
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import (
    NO_NODE,
    Condition,
    LedgerRecord,
    PodRecord,
    PodReport,
    TopologyRecord,
    VmiRecord,
)
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


@dataclass(frozen=True, slots=True)
class CheckedNode:
    """One node at one moment: the controller decides on its claims and relocations from this alone."""

    name: NodeName
    stored: LedgerRecord | None
    """Its ledger as an object; None where it has none yet."""
    ledger: Ledger
    described: TopologyRecord | None
    reports: Mapping[PodUid, PodReport]
    """The reports of its agent."""
    running: frozenset[PodUid]
    """The pods that its agent reports as running."""
    enforces: bool
    """Whether its agent sets cpusets, so that a running VM can get other cores."""
    pods: Mapping[PodUid, PodRecord]
    """The pods that are bound to it."""
    claimants: Mapping[PodUid, PodRecord]
    """The pods with a claim on it, wherever they are bound; without pods that are not known."""
    deleted: Mapping[PodUid, bool]
    """The pods with a claim on it that were known before, and whether their containers had ended by then."""
    edits: Mapping[PodUid, Mapping[str, str]]
    """The annotations with the present request, of each of its pods that was edited."""
    migrating: frozenset[PodUid]
    """Its pods of VMs that have another pod."""


class PodIndex:
    """Follows the pods of the node cache."""

    def __init__(self, cache: NodeCache) -> None:
        self._pods = cache.pods
        self._vmis = cache.edited_vmis
        self._topologies = cache.topologies
        self._ledgers = cache.ledgers
        self._by_node: dict[NodeName, set[PodUid]] = {}
        self._by_vmi: dict[str, set[PodUid]] = {}
        self._deleted: dict[PodUid, bool] = {}
        """The deleted pods that had a claim, and whether their containers had ended by their status."""
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

    def check(self, name: NodeName) -> CheckedNode:
        """Return a node as it is known now."""
        known, vmis, described = self._pods.records, self._vmis.records, self._topologies.get(name)
        stored = self._ledgers.current(name)
        ledger = Ledger() if stored is None else stored.ledger
        reports = {} if described is None else described.pods
        pods = {uid: known[uid] for uid in self._by_node.get(name, ()) if uid in known}
        return CheckedNode(
            name=name,
            stored=stored,
            ledger=ledger,
            described=described,
            reports=reports,
            running=frozenset(uid for uid, report in reports.items() if report.running),
            enforces=described is not None and described.enforcement.by_agent,
            pods=pods,
            claimants={uid: known[uid] for uid in ledger.claims if uid in known},
            deleted={uid: self._deleted[uid] for uid in ledger.claims.keys() & self._deleted.keys()},
            edits={uid: asking for uid, pod in pods.items() if (asking := _present_request(pod, vmis))},
            migrating=self._migrating(pods),
        )

    def _migrating(self, pods: Mapping[PodUid, PodRecord]) -> frozenset[PodUid]:
        several = {uid: pod for uid, pod in pods.items() if len(self._by_vmi.get(pod.vmi_uid, ())) > 1}
        return frozenset(
            uid
            for uid, pod in several.items()
            for other in self.of_vmi(pod.vmi_uid)
            if other.uid != uid and other.namespace == pod.namespace and not other.has_ended
        )

    def on_node(self, node: NodeName) -> list[PodRecord]:
        """Return the pods that are bound to a node; for `NO_NODE` the waiting ones."""
        return self._known(self._by_node.get(node, ()))

    def of_vmi(self, uid: str) -> list[PodRecord]:
        """Return the pods of a VM: more than one while it live-migrates."""
        return self._known(self._by_vmi.get(uid, ()))

    def _known(self, uids: Iterable[PodUid]) -> list[PodRecord]:
        known = self._pods.records
        return [known[uid] for uid in uids if uid in known]

    def forget_released(self) -> None:
        """Forget the deleted pods that have no claim any more."""
        has_claim = self._ledgers.nodes_claimed_by
        self._deleted = {uid: ended for uid, ended in self._deleted.items() if has_claim(uid)}

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        if before is not None:
            _discard(self._by_node, before.node, before.uid)
            _discard(self._by_vmi, before.vmi_uid, before.uid)
            if after is None and self._ledgers.nodes_claimed_by(before.uid):
                self._deleted[before.uid] = before.is_terminal
        if after is not None:
            self._by_node.setdefault(after.node, set()).add(after.uid)
            if after.vmi_uid:
                self._by_vmi.setdefault(after.vmi_uid, set()).add(after.uid)


def _present_request(pod: PodRecord, vmis: Mapping[str, VmiRecord]) -> Mapping[str, str]:
    """Return the annotations of a plain pod, or of an edited VM; none for a VM that was not edited."""
    if not pod.vmi:
        return pod.asking
    vmi = vmis.get(pod.vmi_uid)
    # The creator of a pod writes its owner; only one in its own namespace can be true.
    return vmi.asking if vmi is not None and vmi.namespace == pod.namespace else {}


def _discard(index: dict[K, set[PodUid]], key: K, uid: PodUid) -> None:
    here = index.get(key, set())
    here.discard(uid)
    if not here:
        index.pop(key, None)
