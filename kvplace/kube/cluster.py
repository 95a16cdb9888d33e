"""The calls of a whole cluster; components are to declare the few that they make themselves.

Errors are core's only:

    Conflict              somebody was faster; read again and decide again
      OwnershipConflict   a CPU would go from one pod to another
    Refused               the object is gone
    Unavailable           no answer, or none that tells; after a write the outcome is UNKNOWN: look before
                          trying again
    Forbidden             the rights in manifests/ are not in place
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvplace.kube.events import EventWriter
from kvplace.kube.ledgers import LedgerClient
from kvplace.kube.records import LedgerRecord, PodRecord
from kvplace.kube.watches import WatchClient


class Cluster(WatchClient, LedgerClient, EventWriter, Protocol):
    """What kvplace asks of a cluster."""

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

    async def delete_ledger(self, before: LedgerRecord) -> None:
        """Delete a ledger that is still as `before` says; one that is gone already is fine.

        Raises Conflict when it has changed, is another one, or still has owners.
        """
        ...

    async def annotate_node(self, node: str, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a node, None removes one; others stay. Raises Refused when the node is gone."""
        ...

    async def close(self) -> None:
        """End all watches and connections."""
        ...
