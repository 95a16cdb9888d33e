"""How live migrations, and the VMIs and nodes for them, become records, and the calls of migrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from kvplace.core.well_known_names import MOVE_LABEL
from kvplace.kube.api_list_watch import Resource
from kvplace.kube.migrations import MIGRATIONS, MigrationRecord, PlannedMigration
from kvplace.kube.node_filters import RUNNING_VMIS, SCHEDULABLE_NODES, RunningVmi, SchedulableNode, VmiStatus
from kvplace.kube.object_parts import StoredObject
from kvplace.kube.session import METADATA_ONLY, Call, path_of
from kvplace.kube.watches import Kind

_KUBEVIRT = ("apis", "kubevirt.io", "v1")
_MIGRATIONS = "virtualmachineinstancemigrations"
_VMIS = "virtualmachineinstances"


_MigrationObject: TypeAlias = StoredObject[dict[str, Any], VmiStatus]


def _migration_record(migration: _MigrationObject) -> MigrationRecord:
    meta = migration.metadata
    return MigrationRecord(
        namespace=meta.namespace,
        name=meta.name,
        vmi=str(migration.spec.get("vmiName", "")),
        phase=migration.status.phase if migration.status is not None else "",
        created=meta.creation_timestamp or "",
        is_ours=(meta.labels or {}).get(MOVE_LABEL) == "true",
    )


MIGRATION_RESOURCES: Mapping[Kind[Any, Any], Resource[Any]] = {
    MIGRATIONS: Resource.of(
        _MIGRATIONS,
        path_of(*_KUBEVIRT, _MIGRATIONS),
        msgspec.json.Decoder(_MigrationObject),
        _migration_record,
    ),
    RUNNING_VMIS: Resource.of(
        _VMIS, path_of(*_KUBEVIRT, _VMIS), msgspec.json.Decoder(RunningVmi), lambda vmi: vmi
    ),
    SCHEDULABLE_NODES: Resource.of(
        "nodes", path_of("api", "v1", "nodes"), msgspec.json.Decoder(SchedulableNode), lambda node: node
    ),
}


def create_migration_call(
    migration: PlannedMigration, written_by: Mapping[str, str], *, dry_run: bool = False
) -> Call:
    """Create a migration, or only ask whether KubeVirt would accept it."""
    return Call(
        "create",
        _MIGRATIONS,
        path_of(*_KUBEVIRT, "namespaces", migration.namespace, _MIGRATIONS),
        name=f"{migration.namespace}/{migration.name}",
        query={**written_by, **({"dryRun": "All"} if dry_run else {})},
        body=msgspec.json.encode(migration.document()),
        accept=METADATA_ONLY,
    )


def delete_migration_call(namespace: str, name: str) -> Call:
    """Delete a migration: KubeVirt then removes its target pod, or aborts it."""
    path = path_of(*_KUBEVIRT, "namespaces", namespace, _MIGRATIONS, name)
    return Call("delete", _MIGRATIONS, path, name=f"{namespace}/{name}", accept=METADATA_ONLY)
