"""Makes room: movable VMs get other cores of their node, so that a waiting VM fits.

Filter names a VM that fits on no node. If moves help, `room_moves` carries them out; otherwise one VM may go
to another node (`room_migration`). Meanwhile no VM is evicted for the waiting one.

An attempt may stop at any time, for example at its deadline, or if the node has changed. Then only the begun
moves are completed or undone, and the reservation ends because it is not renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from kvplace.core.cluster.room_in_cluster import MOST_NODES, RoomOnNode, find_room
from kvplace.core.errors import BadAnnotation, KvplaceError
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.concurrency import Turns
from kvplace.kube.events import EventReason, EventRecord, owner_reference
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.movable_vms import MovableVms
from kvplace.nodes.node_machine import NodeSnapshot
from kvplace.scheduler import limits
from kvplace.scheduler.metrics import ROOMS
from kvplace.scheduler.migration_search import MigrationSearch, NoMigration
from kvplace.scheduler.pending_pods import PendingPod, PendingRequest
from kvplace.scheduler.reservations import RoomContext, RoomStopped, about
from kvplace.scheduler.room_migration import RoomMigration
from kvplace.scheduler.room_moves import RoomMoves

log = logging.getLogger(__name__)

_TOO_FEW_CPUS = "Insufficient cpu"
"""The text of kube-scheduler for it; a pod that waits for its volume, for example, needs no room."""
_SNAPSHOT_STEPS, _DESCRIBE_STEPS = 100, 1_000
"""Steps of counting the free resources of a node, and of describing its VMs."""


class MakeRoom(Enum):
    """The VMs that room is made for (`serve --make-room`)."""

    OFF = "off"
    ON_REQUEST = "on-request"
    """For VMs that request it: `kvplace.io/make-room`."""
    AUTOMATIC = "automatic"
    NODES = "nodes"
    """For all VMs; where that does not help, one VM goes to another node."""


@dataclass(eq=False)
class _Making:
    """The room that is made for one VM."""

    pod: PodRecord
    pending: PendingPod
    request: Request
    nodes: tuple[NodeName, ...]
    pause_s: float
    """The pause of making room for the VM afterwards."""
    found: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when moves have been found; without any, the making is over."""
    node: NodeName | None = None


class RoomMaker:
    """Makes room for VMs that wait."""

    def __init__(self, context: RoomContext, mode: MakeRoom) -> None:
        self._context = context
        self._cache = context.cache
        self._pending = context.pending
        self._mode = mode
        self._clock = context.clock
        self._vms = MovableVms(context.cache)
        self._migrations = MigrationSearch(context)
        self._making: dict[PodUid, _Making] = {}
        """The work under way, by pod: begun moves are completed or undone after the pod is gone."""
        self._asked: asyncio.Queue[_Making] = asyncio.Queue()
        self._rest_until = float("-inf")
        if mode is not MakeRoom.OFF:
            self._cache.ledgers.subscribe(lambda _node: self._pending.waiting.wake())

    # Calls of the extender.

    def fits_nowhere(self, pod: PodRecord, requested: PendingRequest, nodes: Collection[NodeName]) -> bool:
        """Make room for a pod on one of the nodes soon, if the mode allows it and its pause is over.

        Returns whether it will be tried.
        """
        if self._mode is MakeRoom.OFF:
            return False
        if self._mode is MakeRoom.ON_REQUEST and not requested.pod_request.make_room:
            return False
        now, uid, pending = self._clock(), pod.uid, self._pending.record(pod.uid)
        if self._cache.reserved_on(uid):
            return False  # another replica makes room for it, or has ended: then the reservation does, too
        is_due = max(pending.no_room_before, self._rest_until) <= now
        if uid in self._making or not is_due or len(self._making) >= limits.AT_ONCE:
            return False
        request = requested.pod_request.request
        making = self._making[uid] = _Making(pod, pending, request, tuple(nodes), limits.PAUSE_S)
        self._asked.put_nowait(making)
        return True

    async def is_under_way(self, uid: PodUid) -> bool:
        """Return whether room is being made for a pod, after waiting for the search."""
        making = self._making.get(uid)
        if making is None:
            return bool(self._cache.reserved_on(uid))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.DECIDED_S):
                await making.found.wait()
        return self._making.get(uid) is making

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._mode is MakeRoom.NODES:
                group.create_task(self._try_waiting_pods())
            while True:
                group.create_task(self._make(await self._asked.get()))

    async def _try_waiting_pods(self) -> None:
        """Search for migrations for VMs without Filter calls, as every node has too few CPUs for them.

        It tries one VM after the other, beginning with the one that has waited longest for a try.
        """
        while True:
            await asyncio.sleep(limits.TRY_S)
            if not self._migrations.is_due:
                continue
            pods = self._cache.pods.records.values()
            waiting = [
                (self._pending.record(pod.uid).no_room_before, -pod.priority, pod.created, pod.uid, pod)
                for pod in pods
                if pod.vmi and _TOO_FEW_CPUS in pod.unschedulable and self._pending.needs_room(pod.uid)
            ]
            for *_, pod in sorted(waiting):
                with contextlib.suppress(BadAnnotation):  # its Filter call names the fault
                    requested = self._pending.request_of(pod)
                    if requested is not None and self.fits_nowhere(pod, requested, ()):
                        break

    # One VM.

    async def _make(self, making: _Making) -> None:
        outcome = "none"
        try:
            work = await self._find_work(making)
            if work is not None:
                making.found.set()
                await work.carry_out()
                outcome = "made"
        except (RoomStopped, KvplaceError) as error:
            outcome = "stopped"
            self._say_why(making, str(error))
        finally:
            del self._making[making.pod.uid]
            making.found.set()
            making.pending.no_room_before = self._clock() + making.pause_s
            ROOMS.labels(outcome).inc()

    async def _find_work(self, making: _Making) -> RoomMoves | RoomMigration | None:
        """Search for moves inside a node, then for a migration."""
        room = await self._find(making)
        if room is not None:
            return RoomMoves(self._context, making.pod, room)
        if self._mode is not MakeRoom.NODES:
            return None
        found = await self._migrations.find(making.pod, making.request, making.nodes)
        if isinstance(found, NoMigration):
            if found.soon:
                making.pause_s = limits.SOON_S
            elif found.why:
                self._say_why(making, f"no VM migrates: {found.why}")
            return None
        making.node = found.here.node
        return found

    def _say_why(self, making: _Making, why: str) -> None:
        """Write an event on the waiting VM; none if it waits no longer, since its owner knows its end."""
        log.info("no room is made any more: %s", why, extra=about(making.pod, making.node or ""))
        if self._pending.needs_room(making.pod.uid):
            self._context.events.record(
                EventRecord(owner_reference(making.pod), EventReason.ROOM_NOT_MADE, why)
            )

    async def _find(self, making: _Making) -> RoomOnNode | None:
        """Search for moves on the nodes with movable VMs, the nodes with most free CPUs first.

        None if no moves help, or room is being made for another VM on that node.
        """
        ranked = []
        turns = Turns()
        for node in making.nodes:
            await turns.spend(_SNAPSHOT_STEPS)
            if self._vms.may_be_on(node):
                snapshot = self._pending.snapshot(node, but=making.pod.uid)
                if isinstance(snapshot, NodeSnapshot) and _may_hold(snapshot, making.request):
                    ranked.append((-snapshot.free.cpus.bit_count(), node))
        crowded = []
        for _, node in sorted(ranked)[:MOST_NODES]:
            await turns.spend(_DESCRIBE_STEPS)
            taken = self._pending.held_on(node, but=making.pod.uid)
            described = self._vms.crowded(node, taken)
            crowded += [described] if described is not None else []
        if not crowded:
            return None
        started = self._clock()
        found: RoomOnNode | None = await self._context.background(find_room, crowded, making.request)
        self._rest_until = self._clock() + limits.REST * (self._clock() - started)
        if found is None or any(other.node == found.node for other in self._making.values()):
            return None
        making.node = found.node
        return found


def _may_hold(snapshot: NodeSnapshot, request: Request) -> bool:
    """Whether a node has enough free CPUs, wherever they are."""
    free = snapshot.free
    return (free.cpus if request.owns_cpus else free.pool).bit_count() >= request.vcpus
