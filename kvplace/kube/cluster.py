"""The port to a cluster: everything that rooms may ask of Kubernetes, and how it can fail.

There are two sides with one contract (tests/kube/test_cluster_contract.py): `ApiCluster` speaks to an API
server, `MemoryCluster` is one, small, in this process, for the demo, simulations and tests. Errors are
core's only:

    Conflict              somebody was faster; read again and decide again
      OwnershipConflict   a CPU would go from one pod to another
    Refused               the object is gone
    Unavailable           no answer, or none that tells; after a write the outcome is UNKNOWN: look before
                          trying again
    Forbidden             the rights in manifests/ are not in place
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from kvplace.core.ledger import LedgerChange
from kvplace.kube.events import EventRecord
from kvplace.kube.records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord

K = TypeVar("K")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, eq=False)
class Kind(Generic[K, R]):
    """A kind of object that can be watched, and by what its records are told apart."""

    name: str
    key: Callable[[R], K]

    def __repr__(self) -> str:
        return f"Kind({self.name})"


PODS: Kind[str, PodRecord] = Kind("pods", lambda record: record.uid)
"""Pods that pod admission labelled `kvplace.io/placed: "true"`, by UID."""
NODES: Kind[str, NodeRecord] = Kind("nodes", lambda record: record.name)
TOPOLOGIES: Kind[str, TopologyRecord] = Kind("nodetopologies", lambda record: record.node)
LEDGERS: Kind[str, LedgerRecord] = Kind("nodeledgers", lambda record: record.node)


@dataclass(frozen=True, slots=True)
class Init:
    """A complete list begins; keep the old one until InitDone."""


@dataclass(frozen=True, slots=True)
class InitApply(Generic[R_co]):
    """One record of the list that Init began."""

    record: R_co


@dataclass(frozen=True, slots=True)
class InitDone:
    """The list is complete; what it did not name is gone."""


@dataclass(frozen=True, slots=True)
class Apply(Generic[R_co]):
    """A record is new or has changed."""

    record: R_co


@dataclass(frozen=True, slots=True)
class Delete(Generic[R_co]):
    """A record is gone; carries what was last known of it."""

    record: R_co


WatchEvent: TypeAlias = Init | InitApply[R] | InitDone | Apply[R] | Delete[R]


class Cluster(Protocol):
    """What kvplace asks of a cluster."""

    def watch(self, kind: Kind[K, R]) -> AsyncIterator[WatchEvent[R]]:
        """Follow all objects of a kind, for ever.

        Begins with Init, and begins anew whenever the past is lost. Never raises for a server that is
        away, busy or forgetful: it tries again with growing pauses.
        """
        ...

    async def bind(
        self, namespace: str, pod: str, uid: str, node: str, annotations: Mapping[str, str]
    ) -> None:
        """Bind a pod and put annotations on it, in one write.

        Raises Conflict when the pod is bound, being deleted, gated or another one than `uid`, Refused
        when it is gone, and Unavailable when the outcome is unknown. Does not look whether the node exists.
        """
        ...

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        """Read a pod as the API server has it now; None when there is none."""
        ...

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Read a VirtualMachineInstance as it is, as JSON; None when there is none."""
        ...

    async def read_ledger(self, node: str) -> LedgerRecord | None:
        """Read a ledger as the API server has it now; None when there is none."""
        ...

    async def create_ledger(self, node: str) -> LedgerRecord:
        """Make an empty ledger for a node; answers the one that is there already."""
        ...

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        """Change a ledger that is still as `before` says; answers what is stored then.

        Raises Conflict when it has changed or is gone, OwnershipConflict when a CPU would change hands.
        """
        ...

    async def delete_ledger(self, before: LedgerRecord) -> None:
        """Delete a ledger that is still as `before` says; one that is gone already is fine.

        Raises Conflict when it has changed, is another one, or still has owners.
        """
        ...

    async def record_event(self, event: EventRecord) -> None:
        """Write one event; one call makes one event."""
        ...

    async def annotate_node(self, node: str, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a node, None removes one; others stay. Raises Refused when the node is gone."""
        ...

    async def close(self) -> None:
        """End all watches and connections."""
        ...
