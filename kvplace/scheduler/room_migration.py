"""Makes room by one live migration: a running VM goes to another node, and a waiting VM gets its cores.

The order of the writes decides the state after a crash:

1. The cores on the target are reserved under the UID of the VMI, bound to the name of the migration.
2. The VM's present cores are reserved for the waiting pod.
3. The migration is created. Its target pod alone is offered the target, and its bind takes the reservation.
4. The claim of the source ends with its QEMU, and the waiting pod is bound.

The ledgers and the migration hold all state, and this process only renews the reservations. So after a crash
the VM runs where it is or where it went: reservations end by themselves, and KubeVirt ends a migration if its
target pod finds no node. One move is under way in a cluster. Each replica reserves before it searches for
moves of others, so of two replicas that begin at the same time at least one gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from kvplace.core.claim_changes import is_for_migration, reserve_for_migration
from kvplace.core.cluster.room_in_cluster import RoomByMigration
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import KvplaceError, Unavailable
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.kube.events import EventReason, EventRecord, owner_reference
from kvplace.kube.migrations import MIGRATIONS, START_S, MigrationRecord, PlannedMigration, read_migration
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import LEDGERS
from kvplace.nodes.movable_vms import MovableVm
from kvplace.nodes.node_machine import NodeMachine
from kvplace.scheduler import limits
from kvplace.scheduler.metrics import ROOM_MIGRATIONS
from kvplace.scheduler.migration_history import MigrationHistory
from kvplace.scheduler.reservations import (
    OwnReservation,
    RoomContext,
    RoomStopped,
    check_unchanged,
    future_claim,
    given_back,
    reserve_what_leaves,
    tell_both,
    until_when,
)


@dataclass(frozen=True, slots=True)
class RoomMigration:
    """One migration for one waiting VM, with its two reservations."""

    context: RoomContext
    history: MigrationHistory
    pod: PodRecord
    """The pod that waits for the room."""
    vm: MovableVm
    room: RoomByMigration
    migration: PlannedMigration
    there: OwnReservation
    """On the target."""
    here: OwnReservation
    """On the node that the VM leaves."""

    async def carry_out(self) -> None:
        """Make room by the migration, and return when the waiting pod is bound.

        Raises RoomStopped or a KvplaceError when no room was made; the VM runs on then, and nothing is
        reserved.
        """
        async with given_back(self.context.cache.ledgers, self.there, self.here):
            try:
                await self._reserve_there()
                await self._reserve_here()
                await self._create()
                await self._follow()
            except (RoomStopped, KvplaceError) as stopped:
                if self.history.has_begun(self.migration.name):
                    why = f"the migration {self.migration.name} made no room: {stopped}"
                    self.context.events.record(
                        EventRecord(owner_reference(self.vm.pod), EventReason.ROOM_NOT_MADE, why)
                    )
                raise

    async def _reserve_there(self) -> None:
        """Reserve the VM's cores on the target; no pod owns them until the target pod is bound."""
        cache, node, name = self.context.cache, self.there.node, self.migration.name
        namespace, vmi = self.vm.pod.namespace, self.vm.pod.vmi
        whole = claim_of(
            self.there.uid,
            self.room.placement,
            namespace=namespace,
            pod=name,
            vmi=vmi,
            since=self.there.since,
        )

        def change(ledger: Ledger, machine: NodeMachine) -> LedgerChange | None:
            if any(is_for_migration(claim) for claim in ledger.claims.values()):
                return None
            held = self.context.pending.held_on(node)
            if not (cache.enforces(node) and machine.can_give(whole, ledger, held)):
                return None
            reserved = reserve_for_migration(whole, name, until=until_when(self.context.now()))
            return LedgerChange(claims=(reserved,))

        if not await self.there.take(cache, change):
            raise RoomStopped(f"{node} has changed since the migration was found")

    async def _reserve_here(self) -> None:
        """Reserve the VM's present cores for the waiting pod."""
        vm, node, uid = self.vm, self.here.node, self.pod.uid
        await check_unchanged(self.context.cluster, vm)
        whole = future_claim(self.pod, self.room.room, self.here.since)

        def change(ledger: Ledger, machine: NodeMachine) -> LedgerChange | None:
            if ledger.claims.get(vm.pod.uid) != vm.claim:
                return None
            held = self.context.pending.held_on(node, but=uid)
            until = until_when(self.context.now())
            reserved = reserve_what_leaves(ledger, machine, held, whole, (vm.pod.uid,), until=until)
            return None if reserved is None else LedgerChange(claims=(reserved,))

        if not await self.here.take(self.context.cache, change):
            raise RoomStopped(f"{node} has changed since the migration was found")

    async def _create(self) -> None:
        """Create the migration, unless another move is under way or KubeVirt would refuse it."""
        cluster = self.context.cluster
        for record in await cluster.read_all(LEDGERS):
            for claim in record.ledger.claims.values():
                if is_for_migration(claim) and self.there.find(record.ledger) != claim:
                    raise RoomStopped("another VM migrates to make room")
        # Read after the ledgers: a move has a reservation there until its migration is in this list.
        if why := self.history.why_not_now(await cluster.read_all(MIGRATIONS)):
            raise RoomStopped(why)
        self.history.begun(self.migration.name, self.vm.pod.vmi_uid)
        await cluster.create_migration(self.migration, dry_run=True)
        with contextlib.suppress(Unavailable):  # it may be there: the next reads show it
            await cluster.create_migration(self.migration)
        ROOM_MIGRATIONS.inc()
        source, cpus = self.room.vm.node, format_cpu_list(self.room.placement.cpus)
        tell_both(
            self.context.events,
            self.vm.pod,
            self.pod,
            f"migrates from {source} to CPUs {cpus} of {self.room.target}",
            to_mover=f" (migration {self.migration.name})",
            to_waiting=f" on {source}",
        )

    async def _follow(self) -> None:
        """Renew both reservations until the pod is bound; raises RoomStopped when it will not be."""
        migration, cluster, clock = self.migration, self.context.cluster, self.context.clock
        created = renewed = clock()
        succeeded: float | None = None
        record: MigrationRecord | None = None
        while self._waits:
            await asyncio.sleep(limits.POLL_S)
            now = clock()
            if now - renewed >= limits.RENEW_S:
                renewed = now
                for kept in (self.there, self.here):
                    await kept.renew(self.context.cache.ledgers, self.context.now())
            try:
                record = await read_migration(cluster, migration.namespace, migration.name)
            except Unavailable:
                continue
            if record is not None and record.phase == "Succeeded":
                succeeded = succeeded or now
            if succeeded is not None:
                if now - succeeded > limits.BOUND_AFTER_MIGRATION_S and self._waits:
                    raise RoomStopped("the VM that waits was not bound in time")
                continue
            if record is None and now - created > limits.UNANSWERED_S:
                raise RoomStopped("the migration was deleted")
            if record is not None and record.phase == "Failed":
                raise RoomStopped("KubeVirt reports that the migration failed")
            if now - created > START_S and (record is None or not record.has_started):
                await cluster.delete_migration(migration.namespace, migration.name)
                raise RoomStopped(f"the migration did not start within {START_S:g} s")
        known = self.context.cache.pods.get(self.pod.uid)
        if known is not None and known.node:
            return
        if record is None or not record.has_started:
            await cluster.delete_migration(migration.namespace, migration.name)
        raise RoomStopped("the VM waits no longer")

    @property
    def _waits(self) -> bool:
        return self.context.pending.needs_room(self.pod.uid)
