"""Live migrations of VMs: a record of each, and the migrations that kvplace creates to move a VM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import MOVE_LABEL
from kvplace.kube.watches import KUBEVIRT, NAME_FIELD, NAMESPACE_FIELD, ApiKind, Kind, ListClient, Selector

_EVACUATION = "kubevirt-evacuation-"
"""How KubeVirt's evacuation controller names migrations."""
_STARTED = ("Running", "Succeeded", "Failed")
_ENDED = ("Succeeded", "Failed")
UNSCHEDULABLE_S = 30
"""How long KubeVirt lets the target pod of a move be unschedulable."""
PENDING_S = 120
"""How long it lets this pod be pending."""
START_S = 180.0
"""A migration of kvplace is deleted if its guest is not on its way after so long."""
PEACE_AFTER_MIGRATION_S = 1800.0
"""How long kvplace does not migrate a VM that has migrated, or is about to."""
NAME_PREFIX = "kvplace-"
"""The beginning of the names of the migrations that kvplace creates."""


@dataclass(frozen=True, slots=True)
class MigrationRecord:
    """A VirtualMachineInstanceMigration."""

    namespace: str
    name: str
    vmi: str
    """The name of the VMI that migrates."""
    phase: str = ""
    """As KubeVirt spells it; empty before KubeVirt has seen it."""
    created: str = ""
    """When it was created, RFC 3339."""
    is_ours: bool = False
    """Whether kvplace has created it."""

    @property
    def has_started(self) -> bool:
        """Whether the guest is or was on its way: until then nothing of it has moved."""
        return self.phase in _STARTED

    @property
    def has_ended(self) -> bool:
        """Whether KubeVirt has nothing more to do for it."""
        return self.phase in _ENDED

    @property
    def is_evacuation(self) -> bool:
        """Whether it empties a node."""
        return self.name.startswith(_EVACUATION)


MIGRATIONS: Kind[tuple[str, str], MigrationRecord] = Kind(
    ApiKind("virtualmachineinstancemigrations", KUBEVIRT),
    lambda record: (record.namespace, record.name),
    {NAME_FIELD: lambda record: record.name, NAMESPACE_FIELD: lambda record: record.namespace},
)


async def read_migration(cluster: ListClient, namespace: str, name: str) -> MigrationRecord | None:
    """Read a live migration as the API server has it now; None if there is none."""
    found = await cluster.read_all(MIGRATIONS, Selector(namespace=namespace, fields={NAME_FIELD: name}))
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class PlannedMigration:
    """A live migration to one node, as kvplace creates it."""

    namespace: str
    name: str
    vmi: str
    target: NodeName

    @classmethod
    def of(cls, namespace: str, vmi: str, target: NodeName, mark: str) -> PlannedMigration:
        """Plan the migration of a VMI; its name has the name of the VMI and a mark that makes it unique."""
        return cls(namespace, f"{NAME_PREFIX}{vmi[:200].rstrip('.-')}-{mark}", vmi, target)

    def document(self) -> dict[str, Any]:
        """Return the object of KubeVirt."""
        return {
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstanceMigration",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "labels": {MOVE_LABEL: "true"},
                "annotations": {
                    "kubevirt.io/migrationUnschedulablePodTimeoutSeconds": str(UNSCHEDULABLE_S),
                    "kubevirt.io/migrationPendingPodTimeoutSeconds": str(PENDING_S),
                },
            },
            "spec": {
                "vmiName": self.vmi,
                "addedNodeSelector": {"kubernetes.io/hostname": self.target},
            },
        }
