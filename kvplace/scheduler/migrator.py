"""Makes room by one live migration: a running VM goes to another node, and a waiting VM gets what it leaves.

The order of the writes decides what a crash leaves:

1. The cores on the target are reserved under the UID of the VMI, bound to the name of the migration.
2. What the VM leaves is reserved for the waiting pod.
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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import ParamSpec, Protocol, TypeVar

from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cluster.room_by_migration import MigratableVm, RoomByMigration, find_migration
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import KvplaceError, Unavailable
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.log_fields import about_pod
from kvplace.core.preemption.victims import OccupiedMachine
from kvplace.core.request import Request
from kvplace.core.request_json import read_pod_request
from kvplace.core.reservation import is_for_migration, kept_for, reserve, reserve_for_migration
from kvplace.core.scalars import NO_CPUS, NodeName, PodUid
from kvplace.kube.api_migrations import RUNNING_VMIS, SCHEDULABLE_NODES, RunningVmi
from kvplace.kube.concurrency import Turns
from kvplace.kube.events import EventRecorder, making_room, owner_reference, room_not_made
from kvplace.kube.migrations import MIGRATIONS, MigrationRecord, PlannedMigration
from kvplace.kube.node_filters import SchedulableNode
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import LEDGERS, NAME_FIELD, ListClient, Selector
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable
from kvplace.scheduler.claim_placements import rfc3339
from kvplace.scheduler.holds import Holds
from kvplace.scheduler.kept_room import RENEW_S, KeptRoom, RoomStopped, until_when
from kvplace.scheduler.metrics import ROOM_MIGRATIONS
from kvplace.scheduler.movable_vms import MovableVm, MovableVms
from kvplace.scheduler.pending_pods import PodReader

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

START_S = 180.0
"""A migration is deleted if its guest is not on its way after so long."""
MOST_PER_HOUR = 6
PEACE_S = 1800.0
"""How long a VM is left alone after any migration of it was created."""
EVACUATION_S = 600.0
"""An evacuation may still go on so long after its last migration was created."""
SEARCH_S = 60.0
"""All VMIs are read once in so long at most."""
BOUND_S = 60.0
"""How long the waiting VM may take to be bound after the migration."""
POLL_S = 5.0
"""A migration is read so often."""
_UNANSWERED_S = 15.0
"""A migration that was created without an answer may appear so late."""
MOST_REFUSED = 16
"""Targets that kube-scheduler would refuse: each is left out of the next search, up to so many."""
_NODE_STEPS = 100


class Background(Protocol):
    """Runs a computation beside the event loop, as `asyncio.to_thread` does."""

    async def __call__(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the computation returns."""
        ...


class MigrationClient(PodReader, ListClient, Protocol):
    """The cluster calls of migrating."""

    async def create_migration(self, migration: PlannedMigration, *, dry_run: bool = False) -> None:
        """Create a live migration, or only ask whether KubeVirt would accept it.

        Raises Conflict when there is one of this name, and Rejected or Forbidden when KubeVirt refuses it.
        """
        ...

    async def delete_migration(self, namespace: str, name: str) -> None:
        """Delete a live migration; one that is gone already is not an error."""
        ...


@dataclass(frozen=True, slots=True)
class MoveToNode:
    """A migration for one waiting VM, and its two reservations."""

    vm: MovableVm
    room: RoomByMigration
    migration: PlannedMigration
    there: KeptRoom
    """On the target."""
    here: KeptRoom
    """On the node that the VM leaves."""


class Migrator:
    """Finds migrations that make room and carries them out, one at a time."""

    def __init__(
        self,
        cluster: MigrationClient,
        cache: NodeCache,
        holds: Holds,
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
        self._holds = holds
        self._events = events
        self._strategy = strategy
        self._now = now
        self._clock = clock
        self._background = background
        self._vms = MovableVms(cache)
        self._next_search = float("-inf")
        self._not_before: dict[str, float] = {}
        """Until when a VMI is left alone, since a migration of it that has failed may be deleted."""
        self._created: dict[str, float] = {}
        """When migrations were created here; deleted ones count, too."""

    # Find.

    async def find(self, pod: PodRecord, request: Request, nodes: Collection[NodeName]) -> MoveToNode | None:
        """Find a migration that lets a VM fit on one of the nodes; None if none helps or may begin now."""
        if self._clock() < self._next_search or self._is_reserved():
            return None
        vms = await self._candidates(nodes)
        if not vms:
            return None
        self._next_search = self._clock() + SEARCH_S
        migrations = await self._cluster.read_all(MIGRATIONS)
        vmis = {vmi.uid: vmi for vmi in await self._cluster.read_all(RUNNING_VMIS)}
        await self._delete_overdue(migrations)
        why = self._why_not_now(migrations)
        if any(vmi.is_evacuated for vmi in vmis.values()):
            why = "VMs are being evacuated"
        if why:
            log.info("no VM migrates to make room: %s", why, extra=_about(pod))
            return None
        resting = {
            (one.namespace, one.vmi)
            for one in migrations
            if not one.has_ended or self._age_s(one.created) < PEACE_S
        }
        able = {
            uid: (vm, vmis[vm.pod.vmi_uid])
            for uid, vm in vms.items()
            if (vm.pod.namespace, vm.pod.vmi) not in resting and self._may_go(vm, vmis)
        }
        return await self._search(pod, request, nodes, able) if able else None

    def _is_reserved(self) -> bool:
        """Whether a migration is under way and its target pod not bound, by the ledgers as known here."""
        ledgers = map(self._cache.ledger, self._cache.ledgers.nodes_with_reservations)
        return any(is_for_migration(claim) for ledger in ledgers for claim in ledger.claims.values())

    async def _candidates(self, nodes: Collection[NodeName]) -> dict[PodUid, MovableVm]:
        """Return the VMs on the nodes that may leave them, by what is known without a call."""
        found: dict[PodUid, MovableVm] = {}
        turns = Turns()
        migrating = self._vms.migrating()
        for node in nodes:
            await turns.spend(_NODE_STEPS)
            if not self._vms.may_be_on(node):
                continue
            for uid in self._cache.ledger(node).claims:
                vm = self._vms.find(node, uid, migrating)
                # A device of the host stays on its node.
                if vm is not None and vm.may_migrate and vm.pod.vmi_uid and not _request_of(vm).devices:
                    found[uid] = vm
        return found

    async def _delete_overdue(self, migrations: Sequence[MigrationRecord]) -> None:
        """Delete our migrations that have not started in time: their replica has ended."""
        for one in migrations:
            if one.is_ours and not one.has_started and self._age_s(one.created) > START_S:
                await self._cluster.delete_migration(one.namespace, one.name)

    def _why_not_now(self, migrations: Sequence[MigrationRecord]) -> str:
        """State why no migration may begin, in one clause; empty if one may."""
        if any(one.is_ours and not one.has_ended for one in migrations):
            return "another VM migrates to make room"
        evacuations = [one for one in migrations if one.is_evacuation]
        if any(not one.has_ended or self._age_s(one.created) < EVACUATION_S for one in evacuations):
            return "VMs are being evacuated"
        lately = {one.name for one in migrations if one.is_ours and self._age_s(one.created) < 3600}
        self._created = {name: at for name, at in self._created.items() if self._clock() - at < 3600}
        if len(lately | self._created.keys()) >= MOST_PER_HOUR:
            return f"{MOST_PER_HOUR} migrations have begun within an hour"
        return ""

    def _may_go(self, vm: MovableVm, vmis: dict[str, RunningVmi]) -> bool:
        vmi = vmis.get(vm.pod.vmi_uid)
        if vmi is None or (vmi.metadata.namespace, vmi.metadata.name) != (vm.pod.namespace, vm.pod.vmi):
            return False
        return not vmi.obstacle and self._not_before.get(vmi.uid, float("-inf")) <= self._clock()

    def _age_s(self, created: str) -> float:
        return (self._now() - datetime.fromisoformat(created)).total_seconds() if created else 0.0

    async def _search(
        self,
        pod: PodRecord,
        request: Request,
        nodes: Collection[NodeName],
        able: dict[PodUid, tuple[MovableVm, RunningVmi]],
    ) -> MoveToNode | None:
        """Search until kube-scheduler, too, would accept the target."""
        machines = await self._machines(pod)
        vms = {uid: MigratableVm(uid, vm.pod.node, _request_of(vm)) for uid, (vm, _) in able.items()}
        read: dict[NodeName, SchedulableNode] = {}
        for _ in range(MOST_REFUSED):
            room = await self._background(
                find_migration, machines, list(vms.values()), request, nodes, self._strategy
            )
            if room is None:
                return None
            vm, vmi = able[room.vm.uid]
            for node in (room.target, room.vm.node):
                if node not in read:
                    read[node] = await self._read_node(node)
            if not vmi.obstacle_on(read[room.target], read[room.vm.node]):
                return self._move(pod, vm, room)
            for uid, (other, its_vmi) in able.items():
                source = read.get(other.pod.node, SchedulableNode())
                if its_vmi.obstacle_on(read[room.target], source):
                    vms[uid] = replace(vms[uid], barred=vms[uid].barred | {room.target})
        return None

    async def _machines(self, pod: PodRecord) -> dict[NodeName, OccupiedMachine]:
        """Describe every node where an agent sets cpusets."""
        found: dict[NodeName, OccupiedMachine] = {}
        turns = Turns()
        for node in self._cache.nodes.records:
            machine = self._cache.machine(node)
            if isinstance(machine, Unusable) or not self._cache.enforces(node):
                continue
            await turns.spend(_NODE_STEPS)
            ledger, holds = self._cache.ledger(node), self._holds.on_node(node, but=pod.uid)
            found[node] = OccupiedMachine(
                machine.topology,
                ledger,
                holds if machine.others is None else (*holds, machine.others),
                machine.allocatable,
                machine.pools_shrink,
                self._cache.free_devices(machine, ledger, holds),
            )
        return found

    async def _read_node(self, node: NodeName) -> SchedulableNode:
        found = await self._cluster.read_all(SCHEDULABLE_NODES, Selector(fields={NAME_FIELD: node}))
        return found[0] if found else SchedulableNode()

    def _move(self, pod: PodRecord, vm: MovableVm, room: RoomByMigration) -> MoveToNode:
        since = rfc3339(self._now())
        mark = blake2b(f"{vm.pod.vmi_uid} {since}".encode(), digest_size=4).hexdigest()
        name = f"kvplace-{vm.pod.vmi[:200].rstrip('.-')}-{mark}"
        return MoveToNode(
            vm,
            room,
            PlannedMigration(vm.pod.namespace, name, vm.pod.vmi, room.target),
            there=KeptRoom(room.target, PodUid(vm.pod.vmi_uid), since),
            here=KeptRoom(room.vm.node, pod.uid, since),
        )

    # Carry out.

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
            self._not_before[move.vm.pod.vmi_uid] = self._clock() + PEACE_S
            if move.migration.name in self._created:
                why = f"the migration {move.migration.name} made no room: {stopped}"
                self._events.record(room_not_made(owner_reference(move.vm.pod), why))
            await self._give_back(move)
            raise
        await self._give_back(move)

    async def _reserve_there(self, move: MoveToNode) -> None:
        """Reserve what the VM is to get on the target; no pod owns it before the target pod is bound."""
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
            if not machine.free(ledger, self._holds.on_node(kept.node)).can_give(whole):
                return LedgerChange(), False
            until = until_when(self._now())
            return LedgerChange(
                claims=(reserve_for_migration(whole, move.migration.name, until=until),)
            ), True

        if not await self._cache.ledgers.change(kept.node, decide, at_once=True):
            raise RoomStopped(f"{kept.node} has changed since the migration was found")

    async def _reserve_here(self, move: MoveToNode, pod: PodRecord) -> None:
        """Reserve for the waiting pod what the VM leaves; the VM is read first, as the cache may be old."""
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
            free = machine.free(left, self._holds.on_node(kept.node, but=pod.uid))
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
        if why := self._why_not_now(await self._cluster.read_all(MIGRATIONS)):
            raise RoomStopped(why)
        await self._cluster.create_migration(move.migration, dry_run=True)
        self._created[move.migration.name] = self._clock()
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
                record = await self._read(move)
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

    async def _read(self, move: MoveToNode) -> MigrationRecord | None:
        selector = Selector(fields={NAME_FIELD: move.migration.name}, namespace=move.migration.namespace)
        found = await self._cluster.read_all(MIGRATIONS, selector)
        return found[0] if found else None

    async def _give_back(self, move: MoveToNode) -> None:
        """End both reservations, unless they have become claims; what fails ends by itself."""
        for kept in (move.there, move.here):
            try:
                await kept.give_back(self._cache.ledgers)
            except KvplaceError as error:
                log.info("a reservation is left to end by itself: %s", error, extra={"node": kept.node})

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
    """Call a VM as the owner of another one may know it."""
    return vm_name(one) if one.namespace == by.namespace else "a VM of another namespace"


def vm_name(pod: PodRecord) -> str:
    """Name the VM of a pod with its namespace."""
    return f"{pod.namespace}/{pod.vm}"


def _request_of(vm: MovableVm) -> Request:
    return replace(read_pod_request(vm.pod.request).request, options=vm.options)


def _about(pod: PodRecord) -> dict[str, object]:
    return about_pod(pod.uid, pod.namespace, pod.name, vmi=pod.vmi)
