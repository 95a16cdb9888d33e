"""The live migrations of the in-memory cluster.

No VM migrates by itself here: a test that plays virt-controller takes the migrations and moves them on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from kvplace.core.errors import Conflict, Forbidden
from kvplace.kube.migrations import MIGRATIONS, MigrationRecord, PlannedMigration
from kvplace.kube.object_log import ObjectLog


class MemoryMigrations:
    """The part of the cluster that is about migrations."""

    def __init__(self) -> None:
        self.migrations = ObjectLog(MIGRATIONS)
        self.migrates_to: dict[str, PlannedMigration] = {}
        """The created migrations by name."""
        self.refuses_migrations = ""
        """Why KubeVirt or the API server refuses a migration; empty if it does not."""
        self.time: Callable[[], str] = lambda: "2026-01-02T00:00:00Z"
        """The date of a migration that is created now."""

    async def create_migration(self, migration: PlannedMigration, *, dry_run: bool = False) -> None:
        await asyncio.sleep(0)
        key = (migration.namespace, migration.name)
        if self.migrations.get(key) is not None:
            raise Conflict(f"migration {migration.namespace}/{migration.name} exists already")
        if self.refuses_migrations:
            raise Forbidden(self.refuses_migrations)
        if not dry_run:
            self.migrates_to[migration.name] = migration
            record = MigrationRecord(*key, migration.vmi, created=self.time(), is_ours=True)
            self.migrations.put(key, record)

    async def delete_migration(self, namespace: str, name: str) -> None:
        await asyncio.sleep(0)
        self.migrations.remove((namespace, name))

    def put_migration(self, namespace: str, name: str, vmi: str, phase: str, *, created: str = "") -> None:
        """Let a migration be in a phase, as virt-controller and other creators of migrations do."""
        known = self.migrations.get((namespace, name))
        record = known or MigrationRecord(namespace, name, vmi, created=created or self.time())
        self.migrations.put((namespace, name), replace(record, phase=phase))
