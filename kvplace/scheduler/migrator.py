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
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from kvplace.core.claim_changes import is_for_migration, kept_for, reserve, reserve_for_migration
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import KvplaceError, Unavailable
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.scalars import NO_CPUS
from kvplace.core.well_known_names import about_pod
from kvplace.kube.events import EventRecorder, making_room, owner_reference, room_not_made
from kvplace.kube.migrations import MIGRATIONS, START_S, MigrationRecord, read_migration
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import LEDGERS
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.metrics import ROOM_MIGRATIONS
from kvplace.scheduler.migration_search import Background, MigrationSearch, MoveToNode
from kvplace.scheduler.pending_pods import PendingPods
from kvplace.scheduler.stored_claims import RENEW_S, RoomStopped, until_when

log = logging.getLogger(__name__)

BOUND_S = 60.0
"""The longest time from the migration to the bind of the waiting VM."""
POLL_S = 5.0
"""The time between two reads of a migration."""
_UNANSWERED_S = 30.0
"""The longest time until a migration appears that was created without an answer."""


class Migrator:
    """Carries out migrations that make room, one at a time."""

    def __init__(
        self,
        cluster: SchedulerClient,
        cache: NodeCache,
        pending: PendingPods,
        events: EventRecorder,
        strategy: Strategy,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
        background: Background = asyncio.to_thread,
    ) -> None:
        """`now` dates reservations and is compared with dates of objects, `clock` times the rest."""
        self._cluster = cluster
        self._cache = cache
        self._pending = pending
        self._events = events
        self._now = now
        self._clock = clock
        self.search = MigrationSearch(
            cluster, cache, pending, strategy, now=now, clock=clock, background=background
        )

    async def carry_out(self, move: MoveToNode, pod: PodRecord, waits: Callable[[], bool]) -> None:
        """Make room for a pod by a migration, and return when the pod is bound.

        `waits` returns whether the pod still needs the room. Raises RoomStopped or a KvplaceError when no
        room was made; the VM runs on then, and nothing is reserved.
        """
        try:
            await self._reserve_there(move)
            await self._reserve_here(move, pod)
            await self._create(move, pod)
            await self._follow(move, pod, waits)
        except (RoomStopped, KvplaceError) as stopped:
            if self.search.has_created(move.migration.name):
                why = f"the migration {move.migration.name} made no room: {stopped}"
                self._events.record(room_not_made(owner_reference(move.vm.pod), why))
            await self._give_back(move)
            raise
        await self._give_back(move)

    async def _reserve_there(self, move: MoveToNode) -> None:
        """Reserve the VM's cores on the target; no pod owns them until the target pod is bound."""
        kept = move.there
        whole = claim_of(
            kept.uid,
            move.room.placement,
            namespace=move.vm.pod.namespace,
            pod=move.migration.name,
            vmi=move.vm.pod.vmi,
            since=kept.since,
        )

        def decide(ledger: Ledger) -> tuple[LedgerChange, bool]:
            if any(is_for_migration(claim) for claim in ledger.claims.values()):
                return LedgerChange(), kept.find(ledger) is not None
            machine = self._cache.machine(kept.node)
            if isinstance(machine, Unusable) or not self._cache.enforces(kept.node):
                return LedgerChange(), False
            if not machine.can_give(whole, ledger, self._pending.held_on(kept.node)):
                return LedgerChange(), False
            until = until_when(self._now())
            return LedgerChange(
                claims=(reserve_for_migration(whole, move.migration.name, until=until),)
            ), True

        if not await self._cache.ledgers.change(kept.node, decide, at_once=True):
            raise RoomStopped(f"{kept.node} has changed since the migration was found")

    async def _reserve_here(self, move: MoveToNode, pod: PodRecord) -> None:
        """Reserve the VM's present cores for the waiting pod, after reading the VM: the cache may be old."""
        vm, kept = move.vm, move.here
        live = await self._cluster.read_pod(vm.pod.namespace, vm.pod.name)
        if live is None or (live.uid, live.placement, live.deleting) != (vm.pod.uid, vm.pod.placement, False):
            raise RoomStopped(f"the VM on {kept.node} that was to migrate has changed")
        whole = claim_of(
            pod.uid,
            move.room.room,
            namespace=pod.namespace,
            pod=pod.name,
            vmi=pod.vmi,
            since=kept.since,
        )

        def decide(ledger: Ledger) -> tuple[LedgerChange, bool]:
            if ledger.claims.get(pod.uid) is not None:
                return LedgerChange(), kept.find(ledger) is not None
            machine = self._cache.machine(kept.node)
            if isinstance(machine, Unusable) or ledger.claims.get(vm.pod.uid) != vm.claim:
                return LedgerChange(), False
            left = ledger.after(LedgerChange(releases=(vm.pod.uid,)))
            free = machine.free(left, self._pending.held_on(kept.node, but=pod.uid))
            if not free.can_give(whole):
                return LedgerChange(), False
            until = until_when(self._now())
            reserved = reserve(ledger, kept_for(whole, ledger, free), but=NO_CPUS, until=until)
            return LedgerChange(claims=(reserved,)), True

        if not await self._cache.ledgers.change(kept.node, decide, at_once=True):
            raise RoomStopped(f"{kept.node} has changed since the migration was found")

    async def _create(self, move: MoveToNode, pod: PodRecord) -> None:
        """Create the migration, unless another move is under way or KubeVirt would refuse it."""
        for record in await self._cluster.read_all(LEDGERS):
            for claim in record.ledger.claims.values():
                if is_for_migration(claim) and move.there.find(record.ledger) != claim:
                    raise RoomStopped("another VM migrates to make room")
        # Read after the ledgers: a move has a reservation there until its migration is in this list.
        if why := self.search.why_not_now(await self._cluster.read_all(MIGRATIONS)):
            raise RoomStopped(why)
        self.search.begun(move.migration.name, move.vm.pod.vmi_uid)
        await self._cluster.create_migration(move.migration, dry_run=True)
        with contextlib.suppress(Unavailable):  # it may be there: the next reads show it
            await self._cluster.create_migration(move.migration)
        ROOM_MIGRATIONS.inc()
        self._tell(move, pod)

    async def _follow(self, move: MoveToNode, pod: PodRecord, waits: Callable[[], bool]) -> None:
        """Renew both reservations until the pod is bound; raises RoomStopped when it will not be."""
        created = renewed = self._clock()
        succeeded: float | None = None
        record: MigrationRecord | None = None
        while waits():
            await asyncio.sleep(POLL_S)
            now = self._clock()
            if now - renewed >= RENEW_S:
                renewed = now
                for kept in (move.there, move.here):
                    await kept.renew(self._cache.ledgers, self._now())
            try:
                record = await read_migration(self._cluster, move.migration.namespace, move.migration.name)
            except Unavailable:
                continue
            if record is not None and record.phase == "Succeeded":
                succeeded = succeeded or now
            if succeeded is not None:
                if now - succeeded > BOUND_S and waits():
                    raise RoomStopped("the VM that waits was not bound in time")
                continue
            if record is None and now - created > _UNANSWERED_S:
                raise RoomStopped("the migration was deleted")
            if record is not None and record.phase == "Failed":
                raise RoomStopped("KubeVirt reports that the migration failed")
            if now - created > START_S and (record is None or not record.has_started):
                await self._cluster.delete_migration(move.migration.namespace, move.migration.name)
                raise RoomStopped(f"the migration did not start within {START_S:g} s")
        known = self._cache.pods.get(pod.uid)
        if known is not None and known.node:
            return
        if record is None or not record.has_started:
            await self._cluster.delete_migration(move.migration.namespace, move.migration.name)
        raise RoomStopped("the VM waits no longer")

    async def _give_back(self, move: MoveToNode) -> None:
        """End both reservations, unless they have become claims; if this fails, they expire."""
        for kept in (move.there, move.here):
            await kept.give_back(self._cache.ledgers)

    def _tell(self, move: MoveToNode, pod: PodRecord) -> None:
        """Write an event about the migration on both VMs."""
        vm, source, target = move.vm.pod, move.room.vm.node, move.room.target
        way = f"from {source} to CPUs {format_cpu_list(move.room.placement.cpus)} of {target}"
        self._events.record(
            making_room(
                owner_reference(vm),
                f"this VM migrates {way}, to make room for {vm_as_known(pod, vm)} "
                f"(migration {move.migration.name})",
            )
        )
        self._events.record(
            making_room(
                owner_reference(pod),
                f"{vm_as_known(vm, pod)} migrates {way}, to make room for this VM on {source}",
            )
        )
        log.info("%s migrates %s", vm_name(vm), way, extra={**_about(pod), "node": source})


def vm_as_known(one: PodRecord, by: PodRecord) -> str:
    """Name a VM for the owner of another VM, without names of other namespaces."""
    return vm_name(one) if one.namespace == by.namespace else "a VM of another namespace"


def vm_name(pod: PodRecord) -> str:
    """Name the VM of a pod with its namespace."""
    return f"{pod.namespace}/{pod.vm}"


def _about(pod: PodRecord) -> dict[str, object]:
    return about_pod(pod.uid, pod.namespace, pod.name, vmi=pod.vmi)
