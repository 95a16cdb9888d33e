"""The cluster as the controller sees it: its calls, and a node with the pods that opted in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import Condition, LedgerRecord, PodRecord
from kvplace.kube.watches import Kind, Selector
from kvplace.nodes.cluster_view import NodeView
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


@dataclass(frozen=True)
class CheckedNode(NodeView):
    """One node at one moment: the controller decides on its claims and relocations from this alone.

    Its `pods` are the pods with a claim on it, wherever they are bound; without pods that are not known.
    """

    bound: Mapping[PodUid, PodRecord] = field(default_factory=dict)
    """The pods that are bound to it."""
    edits: Mapping[PodUid, Mapping[str, str]] = field(default_factory=dict)
    """The annotations with the present request, of each of its pods that was edited."""
    migrating: frozenset[PodUid] = frozenset()
    """Its pods of VMs that have another pod."""

    def runs(self, uid: PodUid) -> bool:
        """Whether its agent reports a running pod."""
        report = self.reports.get(uid)
        return report is not None and report.running


def checked_node(cache: NodeCache, name: NodeName) -> CheckedNode:
    """Return a node as it is known now."""
    known = cache.pods.records
    bound = {pod.uid: pod for pod in cache.pods_on(name)}
    return CheckedNode(
        name,
        cache.machine(name),
        cache.topologies.get(name),
        cache.ledgers.current(name),
        exists=name in cache.nodes.records,
        pods={uid: known[uid] for uid in cache.ledger(name).claims if uid in known},
        bound=bound,
        edits={uid: asking for uid, pod in bound.items() if (asking := cache.edited_request(pod))},
        migrating=frozenset(uid for uid, pod in bound.items() if cache.migrates(pod)),
    )
