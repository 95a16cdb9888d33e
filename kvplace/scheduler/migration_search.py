"""The search for a migration that makes room: permission to begin, the VM, and its target.

kube-scheduler asks an extender only about nodes with enough CPUs in number. If every node has too few CPUs
for a VM, only its pod shows that it waits. Then kvplace repeats kube-scheduler's checks of nodes, CPUs and
memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import blake2b
from typing import ParamSpec, Protocol, TypeVar

from kvplace.core.claim_changes import is_for_migration
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cluster.room_in_cluster import MigratableVm, RoomByMigration, find_migration
from kvplace.core.cluster.victims import OccupiedMachine
from kvplace.core.quantity import counted
from kvplace.core.request import Request
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.well_known_names import about_pod
from kvplace.kube.concurrency import Turns
from kvplace.kube.migrations import (
    MIGRATIONS,
    NAME_PREFIX,
    PEACE_AFTER_MIGRATION_S,
    START_S,
    MigrationRecord,
    PlannedMigration,
)
from kvplace.kube.node_filters import (
    RUNNING_VMIS,
    SCHEDULABLE_NODES,
    RunningVmi,
    SchedulableNode,
    beside_virt_handler,
    lacking,
    obstacle,
)
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import NAME_FIELD, NODE_FIELD, PODS, Selector
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.movable_vms import MovableVm, MovableVms
from kvplace.scheduler.pending_pods import PendingPods
from kvplace.scheduler.stored_claims import OwnReservation, rfc3339

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MOST_PER_HOUR = 6
EVACUATION_S = 600.0
"""The longest time between the migrations of one evacuation."""
SEARCH_S = 60.0
"""The least time between two reads of all VMIs."""
SOON_S = 10.0
"""The pause before the next search, if a VM will likely be able to migrate in a moment."""
_STARTING_S = 300.0
"""Older pods have not just started."""
MOST_REFUSED = 16
"""The most targets that kube-scheduler would refuse; each is left out of the next search."""
_HOUR_S = 3600.0
_NODE_STEPS = 100


class Background(Protocol):
    """Runs a computation beside the event loop, as `asyncio.to_thread` does."""

    async def __call__(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the computation."""
        ...


@dataclass(frozen=True, slots=True)
class MoveToNode:
    """A migration for one waiting VM, and its two reservations."""

    vm: MovableVm
    room: RoomByMigration
    migration: PlannedMigration
    there: OwnReservation
    """On the target."""
    here: OwnReservation
    """On the node that the VM leaves."""


@dataclass(frozen=True, slots=True)
class NoMigration:
    """No migration begins."""

    why: str = ""
    """The reason in one clause, without names of other owners' VMs; empty if no migration helps."""
    soon: bool = False
    """Whether a VM has only just started, and may be able to migrate in a moment."""


class MigrationSearch:
    """Finds migrations that make room, while none is under way."""

    def __init__(
        self,
        cluster: SchedulerClient,
        cache: NodeCache,
        pending: PendingPods,
        strategy: Strategy,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float],
        background: Background,
    ) -> None:
        """`now` is compared with dates of objects, `clock` times the rest."""
        self._cluster = cluster
        self._cache = cache
        self._pending = pending
        self._strategy = strategy
        self._now = now
        self._clock = clock
        self._background = background
        self._vms = MovableVms(cache)
        self._next_search = float("-inf")
        self._created: dict[str, tuple[str, float]] = {}
        """The UID of the VMI of each migration of the last hour, by any replica, and when it was created.

        A migration that has failed may be deleted, and still counts.
        """
        self._seen: dict[str, str] = {}
        """The end of the reservation on the target of each migration."""
        cache.ledgers.subscribe(self._ledger_seen)
        cache.pods.subscribe(self._pod_seen)

    @property
    def is_due(self) -> bool:
        """Whether a search may begin."""
        return self._clock() >= self._next_search and not self._is_reserved()

    def _ledger_seen(self, node: NodeName) -> None:
        """Count a migration, of any replica, once its reservation is renewed, as it has been created then.

        The migration may be deleted before this replica reads it.
        """
        for claim in self._cache.ledger(node).claims.values():
            if claim.reserved is None or not claim.reserved.migration:
                continue
            name, until = claim.reserved.migration, claim.reserved.until
            if self._seen.setdefault(name, until) != until and name not in self._created:
                self.begun(name, claim.uid)

    def _pod_seen(self, _before: PodRecord | None, after: PodRecord | None) -> None:
        """Count a migration, of any replica, by its target pod; its bind takes the reservation."""
        if after is None or not after.migration.startswith(NAME_PREFIX) or after.migration in self._created:
            return
        age_s = self._age_s(after.created)
        if age_s < _HOUR_S:
            self.begun(after.migration, after.vmi_uid, age_s=age_s)

    def has_created(self, migration: str) -> bool:
        """Return whether a migration of this name was created here."""
        return migration in self._created

    def begun(self, migration: str, vmi_uid: str, *, age_s: float = 0.0) -> None:
        """Count a migration that is about to be created, or is `age_s` old; its VM rests afterwards."""
        self._created[migration] = vmi_uid, self._clock() - age_s

    async def find(
        self, pod: PodRecord, request: Request, nodes: Collection[NodeName]
    ) -> MoveToNode | NoMigration:
        """Find a migration that lets a VM fit.

        `nodes` are the nodes where only cores are missing for kube-scheduler. If it is empty, all nodes are
        searched, and the demands of the VM are read from its VMI.
        """
        if not self.is_due:
            return NoMigration()
        vms, starting = await self._candidates(nodes or self._cache.nodes.records)
        if not vms:
            return NoMigration(soon=starting)
        self._next_search = self._clock() + SEARCH_S
        migrations = await self._cluster.read_all(MIGRATIONS)
        vmis = {vmi.uid: vmi for vmi in await self._cluster.read_all(RUNNING_VMIS)}
        await self._delete_overdue(migrations)
        why = self.why_not_now(migrations)
        if any(vmi.is_evacuated for vmi in vmis.values()):
            why = "VMs are being evacuated"
        if why:
            log.info("no VM migrates to make room: %s", why, extra=_about(pod))
            return NoMigration(why)
        resting = {
            (one.namespace, one.vmi)
            for one in migrations
            if not one.has_ended or self._age_s(one.created) < PEACE_AFTER_MIGRATION_S
        }
        able = {}
        obstacles: Counter[str] = Counter()
        for uid, vm in vms.items():
            resting_too = (vm.pod.namespace, vm.pod.vmi) in resting
            if why := "it has migrated lately" if resting_too else self._obstacle(vm, vmis):
                obstacles[why] += 1
                log.info("%s/%s does not migrate: %s", vm.pod.namespace, vm.pod.vmi, why, extra=_about(pod))
            else:
                able[uid] = vm, vmis[vm.pod.vmi_uid]
        waiting = None if nodes else vmis.get(pod.vmi_uid)
        if not able:
            new = (vmis.get(vm.pod.vmi_uid) for vm in vms.values() if self._is_new(vm.pod))
            soon = starting or any(vmi is not None and vmi.has_just_started for vmi in new)
            if soon:
                self._next_search = self._clock() + SOON_S
            return NoMigration(_counted(obstacles), soon)
        if not (nodes or waiting):
            return NoMigration()
        return await self._search(pod, request, nodes, waiting, able) or NoMigration()

    def _is_reserved(self) -> bool:
        """Whether a migration is under way and its target pod not bound, by the ledgers as known here."""
        ledgers = map(self._cache.ledger, self._cache.ledgers.nodes_with_reservations)
        return any(is_for_migration(claim) for ledger in ledgers for claim in ledger.claims.values())

    async def _candidates(self, nodes: Iterable[NodeName]) -> tuple[dict[PodUid, MovableVm], bool]:
        """Return the VMs that may leave the nodes, as far as the watches show.

        Also return whether another VM has just started, and is not pinned yet.
        """
        found: dict[PodUid, MovableVm] = {}
        starting = False
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
                if vm is None and not starting:
                    pod = self._cache.pods.get(uid)
                    starting = pod is not None and self._is_new(pod) and self._vms.is_starting(node, uid)
        return found, starting

    async def _delete_overdue(self, migrations: Sequence[MigrationRecord]) -> None:
        """Delete our migrations that have not started in time: their replica has ended."""
        for one in migrations:
            if one.is_ours and not one.has_started and self._age_s(one.created) > START_S:
                await self._cluster.delete_migration(one.namespace, one.name)

    def why_not_now(self, migrations: Sequence[MigrationRecord]) -> str:
        """State in one clause the reason against a migration now; empty if one may begin."""
        if any(one.is_ours and not one.has_ended for one in migrations):
            return "another VM migrates to make room"
        evacuations = [one for one in migrations if one.is_evacuation]
        if any(not one.has_ended or self._age_s(one.created) < EVACUATION_S for one in evacuations):
            return "VMs are being evacuated"
        lately = {one.name for one in migrations if one.is_ours and self._age_s(one.created) < _HOUR_S}
        begun = self._created.items()
        self._created = {name: (vmi, at) for name, (vmi, at) in begun if self._clock() - at < _HOUR_S}
        self._seen = {name: until for name, until in self._seen.items() if name in self._created}
        if len(lately | self._created.keys()) >= MOST_PER_HOUR:
            return f"{MOST_PER_HOUR} migrations have begun within an hour"
        return ""

    def _obstacle(self, vm: MovableVm, vmis: Mapping[str, RunningVmi]) -> str:
        """State in one clause the obstacle to a migration of a VM; empty if it may migrate."""
        vmi = vmis.get(vm.pod.vmi_uid)
        if vmi is None or (vmi.metadata.namespace, vmi.metadata.name) != (vm.pod.namespace, vm.pod.vmi):
            return "its VMI is gone"
        peace_since = self._clock() - PEACE_AFTER_MIGRATION_S
        if any(uid == vmi.uid and at > peace_since for uid, at in self._created.values()):
            return "it has been asked to migrate lately"
        return vmi.obstacle

    def _is_new(self, pod: PodRecord) -> bool:
        return self._age_s(pod.created) < _STARTING_S

    def _age_s(self, created: str) -> float:
        return (self._now() - datetime.fromisoformat(created)).total_seconds() if created else 0.0

    async def _search(
        self,
        pod: PodRecord,
        request: Request,
        nodes: Collection[NodeName],
        waiting: RunningVmi | None,
        able: Mapping[PodUid, tuple[MovableVm, RunningVmi]],
    ) -> MoveToNode | None:
        """Search until kube-scheduler, too, would accept both nodes."""
        machines = await self._machines(pod)
        vms = {uid: MigratableVm(uid, vm.pod.node, _request_of(vm)) for uid, (vm, _) in able.items()}
        read: dict[NodeName, _ReadNode] = {}
        for _ in range(MOST_REFUSED):
            room = await self._background(
                find_migration,
                machines,
                list(vms.values()),
                request,
                nodes or machines.keys(),
                self._strategy,
            )
            if room is None:
                return None
            vm, vmi = able[room.vm.uid]
            for node in (room.target, room.vm.node):
                if node not in read:
                    read[node] = await self._read_node(node)
            here, there = read[room.vm.node], read[room.target]
            if waiting is not None and here.refuses(pod, waiting, without=vm.pod):
                vms = {uid: one for uid, one in vms.items() if one.node != room.vm.node}
            elif not (vmi.obstacle_on(there.node, here.node) or there.lacks(vm.pod)):
                return self._move(pod, vm, room)
            else:
                for uid, one in vms.items():
                    other, its_vmi = able[uid]
                    source = read.get(one.node, _ReadNode())
                    if its_vmi.obstacle_on(there.node, source.node) or there.lacks(other.pod):
                        vms[uid] = replace(one, barred=one.barred | {room.target})
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
            ledger, holds = self._cache.ledger(node), self._pending.held_on(node, but=pod.uid)
            found[node] = self._cache.occupied(machine, ledger, holds)
        return found

    async def _read_node(self, node: NodeName) -> _ReadNode:
        nodes, pods = await asyncio.gather(
            self._cluster.read_all(SCHEDULABLE_NODES, Selector(fields={NAME_FIELD: node})),
            self._cluster.read_all(PODS, Selector(fields={NODE_FIELD: node})),
        )
        return _ReadNode(nodes[0], tuple(pods)) if nodes else _ReadNode()

    def _move(self, pod: PodRecord, vm: MovableVm, room: RoomByMigration) -> MoveToNode:
        since = rfc3339(self._now())
        mark = blake2b(f"{vm.pod.vmi_uid} {since}".encode(), digest_size=4).hexdigest()
        return MoveToNode(
            vm,
            room,
            PlannedMigration.of(vm.pod.namespace, vm.pod.vmi, room.target, mark),
            there=OwnReservation(room.target, PodUid(vm.pod.vmi_uid), since),
            here=OwnReservation(room.vm.node, pod.uid, since),
        )


@dataclass(frozen=True, slots=True)
class _ReadNode:
    """A node and its pods as the API server has them now."""

    node: SchedulableNode = field(default_factory=SchedulableNode)
    pods: tuple[PodRecord, ...] = ()

    def lacks(self, pod: PodRecord, *, without: PodRecord | None = None) -> bool:
        """Whether too little of a resource is left for a pod, by requests, once another pod is gone."""
        here = [
            one for one in self.pods if not one.is_terminal and (without is None or one.uid != without.uid)
        ]
        return lacking(self.node, pod.resources, [one.resources for one in here])

    def refuses(self, pod: PodRecord, vmi: RunningVmi, *, without: PodRecord) -> bool:
        """Whether kube-scheduler would not let the pod of a VMI come once another pod is gone."""
        return bool(obstacle(self.node, beside_virt_handler(vmi.spec))) or self.lacks(pod, without=without)


def _counted(obstacles: Mapping[str, int]) -> str:
    """State the reasons why no VM that agreed can migrate, each with the number of VMs."""
    reasons = "; ".join(f"{why}: {counted(count, 'VM')}" for why, count in obstacles.items())
    return f"none of the VMs that agreed can migrate now ({reasons})"


def _request_of(vm: MovableVm) -> Request:
    return replace(read_pod_request(vm.pod.request).request, options=vm.options)


def _about(pod: PodRecord) -> dict[str, object]:
    return about_pod(pod.uid, pod.namespace, pod.name, vmi=pod.vmi)
