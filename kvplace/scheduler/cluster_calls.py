"""The cluster calls of the scheduler, apart from watches and ledgers.

`kube` implements them for an API server and in memory; one contract suite tests both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvplace.core.cluster.victims import DisruptionBudget
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.migrations import PlannedMigration
from kvplace.kube.object_records import PodRecord, ResourceClaimRecord
from kvplace.kube.watches import ListClient


class SchedulerClient(ListClient, Protocol):
    """The cluster calls of the scheduler."""

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        """Read a pod as the API server has it now; None if there is none."""
        ...

    async def bind(
        self, namespace: str, pod: str, uid: PodUid, node: NodeName, annotations: Mapping[str, str]
    ) -> None:
        """Bind a pod and put annotations on it, in one write.

        Raises Conflict if the pod is bound, being deleted, gated or has another UID, Refused if it is gone,
        and Unavailable if the outcome is unknown.
        """
        ...

    async def nominate_node(self, pod: PodRecord, node: NodeName) -> None:
        """Nominate a node for a pod that is still as `pod` states.

        Raises Conflict if it has changed, and Refused if it is gone or must not be nominated.
        """
        ...

    async def read_resource_claim(self, namespace: str, name: str) -> ResourceClaimRecord | None:
        """Read a ResourceClaim as the API server has it now; None if there is none."""
        ...

    async def write_claim_status(self, claim: ResourceClaimRecord, status: Mapping[str, Any]) -> str:
        """Change allocation and reservedFor of a ResourceClaim, None removes one; returns its new version.

        Raises Conflict if it has changed since `claim` was read, and Refused if it is gone.
        """
        ...

    async def read_disruption_budgets(self) -> tuple[DisruptionBudget, ...]:
        """Read all PodDisruptionBudgets."""
        ...

    async def create_migration(self, migration: PlannedMigration, *, dry_run: bool = False) -> None:
        """Create a live migration, or only ask whether KubeVirt would accept it.

        Raises Conflict when there is one of this name, and Rejected or Forbidden when KubeVirt refuses it.
        """
        ...

    async def delete_migration(self, namespace: str, name: str) -> None:
        """Delete a live migration; one that is gone already is not an error."""
        ...
