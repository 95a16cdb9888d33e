"""The search for a migration that makes room: permission to begin, the VM, and its target.

kube-scheduler asks an extender only about nodes with enough CPUs in number. If every node has too few CPUs
for a VM, only its pod shows that it waits. Then kvplace repeats kube-scheduler's checks of nodes, CPUs and
memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from kvplace.core.cluster.room_in_cluster import MigratableVm, RoomByMigration, find_migration
from kvplace.core.cluster.victims import OccupiedMachine
from kvplace.core.quantity import counted
from kvplace.core.request import Request
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.concurrency import Turns
from kvplace.kube.migrations import (
    MIGRATIONS,
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
from kvplace.nodes.movable_vms import MovableVm, MovableVms
from kvplace.nodes.node_machine import Unusable
from kvplace.scheduler import limits
from kvplace.scheduler.migration_history import MigrationHistory
from kvplace.scheduler.reservations import OwnReservation, RoomContext, about
from kvplace.scheduler.room_migration import RoomMigration
from kvplace.scheduler.stored_claims import rfc3339

log = logging.getLogger(__name__)

_NODE_STEPS = 100


@dataclass(frozen=True, slots=True)
class NoMigration:
    """No migration begins."""

    why: str = ""
    """The reason in one clause, without names of other owners' VMs; empty if no migration helps."""
    soon: bool = False
    """Whether a VM has only just started, and may be able to migrate in a moment."""


class MigrationSearch:
    """Finds migrations that make room, while none is under way."""

    def __init__(self, context: RoomContext) -> None:
        self._context = context
        self._cluster = context.cluster
        self._cache = context.cache
        self._vms = MovableVms(context.cache)
        self._history = MigrationHistory(context.cache, now=context.now, clock=context.clock)
        self._next_search = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether a search may begin."""
        return self._context.clock() >= self._next_search and not self._history.is_reserved

    async def find(
        self, pod: PodRecord, request: Request, nodes: Collection[NodeName]
    ) -> RoomMigration | NoMigration:
        """Find a migration that lets a VM fit.

        `nodes` are the nodes where only cores are missing for kube-scheduler. If it is empty, all nodes are
        searched, and the demands of the VM are read from its VMI.
        """
        if not self.is_due:
            return NoMigration()
        vms, starting = await self._candidates(nodes or self._cache.nodes.records)
        if not vms:
            return NoMigration(soon=starting)
        self._search_again_after(limits.SEARCH_S)
        migrations = await self._cluster.read_all(MIGRATIONS)
        vmis = {vmi.uid: vmi for vmi in await self._cluster.read_all(RUNNING_VMIS)}
        await self._delete_overdue(migrations)
        why = self._history.why_not_now(migrations)
        if any(vmi.is_evacuated for vmi in vmis.values()):
            why = "VMs are being evacuated"
        if why:
            log.info("no VM migrates to make room: %s", why, extra=about(pod))
            return NoMigration(why)
        able, obstacles = self._able(pod, vms, vmis, migrations)
        if not able:
            new = (vmis.get(vm.pod.vmi_uid) for vm in vms.values() if self._is_new(vm.pod))
            soon = starting or any(vmi is not None and vmi.has_just_started for vmi in new)
            if soon:
                self._search_again_after(limits.SOON_S)
            return NoMigration(_counted(obstacles), soon)
        waiting = None if nodes else vmis.get(pod.vmi_uid)
        if not (nodes or waiting):
            return NoMigration()
        return await self._search(pod, request, nodes, waiting, able) or NoMigration()

    def _search_again_after(self, seconds: float) -> None:
        self._next_search = self._context.clock() + seconds

    async def _candidates(self, nodes: Iterable[NodeName]) -> tuple[dict[PodUid, MovableVm], bool]:
        """Return the VMs that may leave the nodes, as far as the watches show.

        Also return whether another VM has just started, and is not pinned yet.
        """
        found: dict[PodUid, MovableVm] = {}
        starting = False
        turns = Turns()
        for node in nodes:
            await turns.spend(_NODE_STEPS)
            if not self._vms.may_be_on(node):
                continue
            for uid in self._cache.ledger(node).claims:
                vm = self._vms.find(node, uid)
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
            if one.is_ours and not one.has_started and self._history.age_s(one.created) > START_S:
                await self._cluster.delete_migration(one.namespace, one.name)

    def _able(
        self,
        pod: PodRecord,
        vms: Mapping[PodUid, MovableVm],
        vmis: Mapping[str, RunningVmi],
        migrations: Sequence[MigrationRecord],
    ) -> tuple[dict[PodUid, tuple[MovableVm, RunningVmi]], Counter[str]]:
        """Return the VMs that can migrate now, and count the obstacles of the others."""
        stay = self._history.migrated_lately(migrations)
        able = {}
        obstacles: Counter[str] = Counter()
        for uid, vm in vms.items():
            key, vmi = (vm.pod.namespace, vm.pod.vmi), vmis.get(vm.pod.vmi_uid)
            if key in stay:
                why = "it has migrated lately"
            elif vmi is None or (vmi.metadata.namespace, vmi.metadata.name) != key:
                why = "its VMI is gone"
            elif self._history.was_asked_lately(vmi.uid):
                why = "it has been asked to migrate lately"
            else:
                why = vmi.obstacle
            if why:
                obstacles[why] += 1
                log.info("%s/%s does not migrate: %s", *key, why, extra=about(pod))
            elif vmi is not None:
                able[uid] = vm, vmi
        return able, obstacles

    def _is_new(self, pod: PodRecord) -> bool:
        return self._history.age_s(pod.created) < limits.STARTING_S

    async def _search(
        self,
        pod: PodRecord,
        request: Request,
        nodes: Collection[NodeName],
        waiting: RunningVmi | None,
        able: Mapping[PodUid, tuple[MovableVm, RunningVmi]],
    ) -> RoomMigration | None:
        """Search until kube-scheduler, too, would accept both nodes.

        `find_migration` knows only cores and memory of VMs. Its answer is checked with both nodes as they are
        now. If the waiting VM may not come, no VM leaves that node. If the target does not suit the VM, the
        target is barred to each VM that it does not suit. Then the search is repeated.
        """
        machines = await self._machines(pod)
        vms = {uid: MigratableVm(uid, vm.pod.node, _request_of(vm)) for uid, (vm, _) in able.items()}
        read: dict[NodeName, _ReadNode] = {}
        for _ in range(limits.MOST_REFUSED):
            room: RoomByMigration | None = await self._context.background(
                find_migration,
                machines,
                list(vms.values()),
                request,
                nodes or machines.keys(),
                self._context.strategy,
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
                return self._attempt(pod, vm, room)
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
            ledger, holds = self._cache.ledger(node), self._context.pending.held_on(node, but=pod.uid)
            found[node] = self._cache.occupied(machine, ledger, holds)
        return found

    async def _read_node(self, node: NodeName) -> _ReadNode:
        nodes, pods = await asyncio.gather(
            self._cluster.read_all(SCHEDULABLE_NODES, Selector(fields={NAME_FIELD: node})),
            self._cluster.read_all(PODS, Selector(fields={NODE_FIELD: node})),
        )
        return _ReadNode(nodes[0], tuple(pods)) if nodes else _ReadNode()

    def _attempt(self, pod: PodRecord, vm: MovableVm, room: RoomByMigration) -> RoomMigration:
        since = rfc3339(self._context.now())
        mark = blake2b(f"{vm.pod.vmi_uid} {since}".encode(), digest_size=4).hexdigest()
        return RoomMigration(
            self._context,
            self._history,
            pod,
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
