"""The migrations that make room, of all replicas: one at a time in a cluster, and a few within an hour.

The API server has the migrations that exist. One that has failed may be deleted, and still counts. So each
replica also counts the migrations that it sees in ledgers and pods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from kvplace.core.claim_changes import is_for_migration
from kvplace.core.scalars import NodeName
from kvplace.kube.migrations import NAME_PREFIX, PEACE_AFTER_MIGRATION_S, MigrationRecord
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.scheduler import limits

_HOUR_S = 3600.0


class MigrationHistory:
    """Follows ledgers and pods; forgets a migration after an hour."""

    def __init__(self, cache: NodeCache, *, now: Callable[[], datetime], clock: Callable[[], float]) -> None:
        """`now` is compared with dates of objects, `clock` times the rest."""
        self._cache = cache
        self._now = now
        self._clock = clock
        self._created: dict[str, tuple[str, float]] = {}
        """The UID of the VMI of each migration of the last hour, and when it was created."""
        self._seen: dict[str, str] = {}
        """The end of the reservation on the target of each migration."""
        cache.ledgers.subscribe(self._ledger_seen)
        cache.pods.subscribe(self._pod_seen)

    def begun(self, migration: str, vmi_uid: str, *, age_s: float = 0.0) -> None:
        """Count a migration that is about to be created, or is `age_s` old; its VM rests afterwards."""
        self._created[migration] = vmi_uid, self._clock() - age_s

    def has_begun(self, migration: str) -> bool:
        """Return whether a migration of this name was counted."""
        return migration in self._created

    def _ledger_seen(self, node: NodeName) -> None:
        """Count a migration once its reservation is renewed, as it has been created then."""
        for claim in self._cache.ledger(node).claims.values():
            if claim.reserved is None or not claim.reserved.migration:
                continue
            name, until = claim.reserved.migration, claim.reserved.until
            if self._seen.setdefault(name, until) != until and name not in self._created:
                self.begun(name, claim.uid)

    def _pod_seen(self, _before: PodRecord | None, after: PodRecord | None) -> None:
        """Count a migration by its target pod; the bind of this pod takes the reservation."""
        if after is None or not after.migration.startswith(NAME_PREFIX) or after.migration in self._created:
            return
        age_s = self.age_s(after.created)
        if age_s < _HOUR_S:
            self.begun(after.migration, after.vmi_uid, age_s=age_s)

    @property
    def is_reserved(self) -> bool:
        """Whether a migration is under way and its target pod not bound, by the ledgers as known here."""
        ledgers = map(self._cache.ledger, self._cache.ledgers.nodes_with_reservations)
        return any(is_for_migration(claim) for ledger in ledgers for claim in ledger.claims.values())

    def was_asked_lately(self, vmi_uid: str) -> bool:
        """Return whether a VMI was to migrate for others so recently that it stays now."""
        since = self._clock() - PEACE_AFTER_MIGRATION_S
        return any(uid == vmi_uid and at > since for uid, at in self._created.values())

    def migrated_lately(self, migrations: Iterable[MigrationRecord]) -> set[tuple[str, str]]:
        """Return the VMIs that stay because of migrations in the API server: namespaces and names."""
        return {
            (one.namespace, one.vmi)
            for one in migrations
            if not one.has_ended or self.age_s(one.created) < PEACE_AFTER_MIGRATION_S
        }

    def why_not_now(self, migrations: Sequence[MigrationRecord]) -> str:
        """State in one clause the reason against a migration now; empty if one may begin.

        `migrations` are those in the API server.
        """
        if any(one.is_ours and not one.has_ended for one in migrations):
            return "another VM migrates to make room"
        evacuations = [one for one in migrations if one.is_evacuation]
        if any(not one.has_ended or self.age_s(one.created) < limits.EVACUATION_S for one in evacuations):
            return "VMs are being evacuated"
        lately = {one.name for one in migrations if one.is_ours and self.age_s(one.created) < _HOUR_S}
        begun = self._created.items()
        self._created = {name: (vmi, at) for name, (vmi, at) in begun if self._clock() - at < _HOUR_S}
        self._seen = {name: until for name, until in self._seen.items() if name in self._created}
        if len(lately | self._created.keys()) >= limits.MOST_PER_HOUR:
            return f"{limits.MOST_PER_HOUR} migrations have begun within an hour"
        return ""

    def age_s(self, created: str) -> float:
        """Return the age of an object by its date; 0 without one."""
        return (self._now() - datetime.fromisoformat(created)).total_seconds() if created else 0.0
