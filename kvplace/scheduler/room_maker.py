"""Makes room: running VMs that may move get other cores of their node, so that a waiting VM fits.

Filter names a VM that fits on no node. If moves are found, they are begun one after the other: one write of
the node's ledger each, which the controller and the node's agent then carry out as every relocation. The
first of these writes also reserves what the VM will get (`core/reservation.py`), so every replica can bind it
there, also when this one is gone by then. The next move begins when the last one is in effect. No VM is
evicted for the one that waits meanwhile.

In every case only the moves that were begun are completed or undone, and a reservation that nothing
renews ends. So giving up is always safe: when the deadline has passed, a VM could not be moved, or the node
has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from functools import partial

from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cluster.room_on_nodes import MOST_NODES, RoomOnNode, find_room
from kvplace.core.cpuset import format_cpu_list, union
from kvplace.core.errors import BadAnnotation, KvplaceError
from kvplace.core.ledger import Claim, Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.moves.make_room import Move
from kvplace.core.quantity import counted
from kvplace.core.relocation import claim_while_relocating
from kvplace.core.request import Request
from kvplace.core.reservation import reserve
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.well_known_names import about_pod
from kvplace.kube.concurrency import Turns
from kvplace.kube.events import EventRecorder, making_room, owner_reference, room_not_made
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeSnapshot, Unusable
from kvplace.scheduler.claim_placements import rfc3339
from kvplace.scheduler.kept_room import RENEW_S, KeptRoom, RoomStopped, until_when
from kvplace.scheduler.metrics import ROOM_MOVES, ROOMS
from kvplace.scheduler.migration_search import Background, MigrationClient
from kvplace.scheduler.migrator import Migrator, vm_as_known, vm_name
from kvplace.scheduler.movable_vms import MovableVm, MovableVms
from kvplace.scheduler.pending_pods import AskingPod, PendingPods

log = logging.getLogger(__name__)

AT_ONCE = 4
"""One replica makes room for so many VMs at a time: as many VMs move at most, and one on each node."""
PATIENCE_S = 300.0
"""How long all moves for one VM may take; then it is given up."""
PAUSE_S = 60.0
"""How long no room is made for a VM again after that ended, or none was found; a VM with a failed move is
left in peace ten times as long."""
_BOUND_S = 30.0
"""How long a VM may take to be bound after room was made for it."""
_DECIDED_S = 4.0
"""How long a preempt call waits for the search; kube-scheduler gives up after 10 s."""
_REST = 4
"""Searches rest so many times as long as the last one took."""
_TRY_S = 10.0
"""How often pods are searched that wait because every node has too few CPUs."""
_TOO_FEW_CPUS = "Insufficient cpu"
"""How kube-scheduler states that; a pod that waits for its volume, for example, needs no room."""
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
    request: Request
    nodes: tuple[NodeName, ...]
    found: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when moves have been found; without any, the making is over."""
    node: NodeName | None = None
    kept: KeptRoom | None = None
    """The reservation, from the first move on."""
    renewed: float = 0.0
    """When it was written last."""


class RoomMaker:
    """Makes room for VMs that wait."""

    def __init__(
        self,
        cluster: MigrationClient,
        cache: NodeCache,
        pending: PendingPods,
        events: EventRecorder,
        mode: MakeRoom,
        strategy: Strategy,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
        background: Background = asyncio.to_thread,
    ) -> None:
        """`now` dates reservations, `clock` times how long moves may take, `background` runs searches."""
        self._cluster = cluster
        self._cache = cache
        self._pending = pending
        self._events = events
        self._mode = mode
        self._now = now
        self._clock = clock
        self._background = background
        self._migrator = Migrator(
            cluster, cache, pending, events, strategy, now=now, clock=clock, background=background
        )
        self._vms = MovableVms(cache)
        self._making: dict[PodUid, _Making] = {}
        self._asked: asyncio.Queue[_Making] = asyncio.Queue()
        self._rest_until = float("-inf")
        if mode is not MakeRoom.OFF:
            cache.ledgers.subscribe(lambda _node: pending.wake())

    # Calls of the extender.

    def fits_nowhere(self, pod: PodRecord, asking: AskingPod, nodes: Collection[NodeName]) -> None:
        """Make room for a pod on one of the nodes, soon, if that is wanted and not tried too often."""
        if self._mode is MakeRoom.OFF:
            return
        if self._mode is MakeRoom.ON_REQUEST and not asking.pod_request.make_room:
            return
        now, uid = self._clock(), pod.uid
        if self._is_reserved(uid):
            return  # another replica makes room for it, or has ended: then the reservation does, too
        is_due = max(self._pending.get(uid).no_room_before, self._rest_until) <= now
        if uid in self._making or not is_due or len(self._making) >= AT_ONCE:
            return
        making = self._making[uid] = _Making(pod, asking.pod_request.request, tuple(nodes))
        self._asked.put_nowait(making)

    async def is_under_way(self, uid: PodUid) -> bool:
        """Return whether room is being made for a pod; waits until it is known whether moves help."""
        making = self._making.get(uid)
        if making is None:
            return self._is_reserved(uid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DECIDED_S):
                await making.found.wait()
        return self._making.get(uid) is making

    def _is_reserved(self, uid: PodUid) -> bool:
        """Whether any replica makes room for a pod."""
        nodes = self._cache.ledgers.nodes_claimed_by(uid)
        claims = (self._cache.ledger(node).claims.get(uid) for node in nodes)
        return any(claim is not None and claim.reserved is not None for claim in claims)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._mode is MakeRoom.NODES:
                group.create_task(self._try_waiting_pods())
            while True:
                group.create_task(self._make(await self._asked.get()))

    async def _try_waiting_pods(self) -> None:
        """Search for migrations for VMs that Filter is not asked about, as every node has too few CPUs.

        One after the other, the one first that was tried the longest time ago.
        """
        tried: dict[PodUid, float] = {}
        while True:
            await asyncio.sleep(_TRY_S)
            pods = self._cache.pods.records.values()
            waiting = [pod for pod in pods if pod.vmi and _TOO_FEW_CPUS in pod.unschedulable]
            tried = {pod.uid: tried.get(pod.uid, float("-inf")) for pod in waiting}
            waiting = [pod for pod in waiting if self._waits(pod) and not self._is_reserved(pod.uid)]
            if not waiting or not self._migrator.search.is_due:
                continue
            pod = min(waiting, key=lambda one: (tried[one.uid], -one.priority, one.created, one.uid))
            tried[pod.uid] = self._clock()
            with contextlib.suppress(BadAnnotation):  # its Filter call names the fault
                asking = self._pending.request_of(pod)
                if asking is not None:
                    self.fits_nowhere(pod, asking, ())

    # One VM.

    async def _make(self, making: _Making) -> None:
        outcome = "none"
        try:
            room = await self._find(making)
            if room is not None:
                outcome = "made" if await self._carry_out(making, room) else "stopped"
                assert making.kept is not None
                await making.kept.give_back(self._cache.ledgers)
            elif self._mode is MakeRoom.NODES and await self._leave_node(making):
                outcome = "made"
        except (RoomStopped, KvplaceError) as error:
            outcome = "stopped"
            self._say_why(making, str(error))
        finally:
            del self._making[making.pod.uid]
            making.found.set()
            self._pending.get(making.pod.uid).no_room_before = self._clock() + PAUSE_S
            ROOMS.labels(outcome).inc()

    async def _leave_node(self, making: _Making) -> bool:
        """Make room by a migration; returns whether one was found, and raises RoomStopped if it made none."""
        move = await self._migrator.search.find(making.pod, making.request, making.nodes)
        if move is None:
            return False
        making.node = move.here.node
        making.found.set()
        await self._migrator.carry_out(move, making.pod, lambda: self._waits(making.pod))
        return True

    def _say_why(self, making: _Making, why: str) -> None:
        """Write an event on the VM that waits; the owner of one that waits no longer knows its end."""
        log.info("no room is made any more: %s", why, extra=_about(making.pod, making.node))
        if self._waits(making.pod):
            self._events.record(room_not_made(owner_reference(making.pod), why))

    async def _find(self, making: _Making) -> RoomOnNode | None:
        """Search for moves on the nodes with movable VMs, those with most free CPUs first.

        None where there are none, or room is being made for another VM on that node.
        """
        ranked = []
        turns = Turns()
        for node in making.nodes:
            await turns.spend(_SNAPSHOT_STEPS)
            if self._vms.may_be_on(node):
                snapshot = self._cache.snapshot(node, self._pending.held_on(node, but=making.pod.uid))
                if isinstance(snapshot, NodeSnapshot) and _may_hold(snapshot, making.request):
                    ranked.append((-snapshot.free.cpus.bit_count(), node))
        crowded = []
        migrating = self._vms.migrating()
        for _, node in sorted(ranked)[:MOST_NODES]:
            await turns.spend(_DESCRIBE_STEPS)
            taken = self._pending.held_on(node, but=making.pod.uid)
            described = self._vms.crowded(node, taken, migrating)
            crowded += [described] if described is not None else []
        if not crowded:
            return None
        started = self._clock()
        found = await self._background(find_room, crowded, making.request)
        self._rest_until = self._clock() + _REST * (self._clock() - started)
        if found is None or any(other.node == found.node for other in self._making.values()):
            return None
        making.node = found.node
        return found

    async def _carry_out(self, making: _Making, room: RoomOnNode) -> bool:
        """Make the moves and wait for the bind; returns whether all were made, after stating why if not."""
        pod, node, moves = making.pod, room.node, room.plan.moves
        making.kept = KeptRoom(node, pod.uid, rfc3339(self._now()))
        whole = claim_of(
            pod.uid,
            room.plan.placement,
            namespace=pod.namespace,
            pod=pod.name,
            vmi=pod.vmi,
            since=making.kept.since,
        )
        making.found.set()
        log.info("room is made by %s", counted(len(moves), "move"), extra=_about(pod, node))
        ends = self._clock() + PATIENCE_S
        try:
            for number, move in enumerate(moves, 1):
                vm = await self._begin(making, whole, moves[number - 1 :])
                ROOM_MOVES.inc()
                self._tell(making, vm, move, f"move {number} of {len(moves)}")
                in_force = partial(self._is_in_force, node, vm, move)
                await self._until(making, in_force, ends, "was not confirmed")
        except (RoomStopped, KvplaceError) as stopped:
            self._say_why(making, str(stopped))
            return False
        ends = self._clock() + _BOUND_S
        with contextlib.suppress(RoomStopped):
            await self._until(making, lambda: not self._waits(pod), ends, "was not bound")
        return True

    async def _begin(self, making: _Making, whole: Claim, moves: Sequence[Move]) -> MovableVm:
        """Begin the first of the moves that are left: claim the new cores of a VM beside its present ones.

        The same write reserves what is free by now of the `whole` claim of the VM that waits. The VM that
        moves is read first, as the cache may be older than a relocation that has just ended.
        """
        node, move = making.node, moves[0]
        assert node is not None
        vm = self._vms.find(node, PodUid(move.id), self._vms.migrating())
        if vm is None or vm.placed.placement != move.before:
            raise RoomStopped(f"a VM on {node} that was to move has changed")
        live = await self._cluster.read_pod(vm.pod.namespace, vm.pod.name)
        if live is None or (live.uid, live.placement, live.deleting) != (vm.pod.uid, vm.pod.placement, False):
            raise RoomStopped(f"a VM on {node} that was to move has changed")
        if not self._waits(making.pod):
            raise RoomStopped("the VM waits no longer")
        following = replace(
            vm.placed, placement=move.after, revision=vm.placed.revision + 1, options=vm.options
        )
        moving = claim_while_relocating(vm.claim, Relocation(following, vm.placed))
        is_first = not making.renewed
        making.renewed = self._clock()
        passed = union(move.after.owned for move in moves)
        until, kept = until_when(self._now()), making.kept
        assert kept is not None

        def decide(ledger: Ledger) -> tuple[LedgerChange, bool]:
            known = ledger.claims.get(making.pod.uid)
            if known is not None and kept.find(ledger) == known:
                if ledger.claims.get(vm.pod.uid) == moving:
                    return LedgerChange(), True  # by an earlier write of ours without an answer
            elif known is not None or not is_first:
                return LedgerChange(), False
            if ledger.claims.get(vm.pod.uid) != vm.claim or not self._has_room(making, ledger, vm, move):
                return LedgerChange(), False
            if not self._fits_after(making, ledger, whole, moves):
                return LedgerChange(), False
            reserved = reserve(ledger, whole, but=passed, until=until)
            return LedgerChange(claims=(moving, reserved)), True

        if not await self._cache.ledgers.change(node, decide):
            raise RoomStopped(f"{node} has changed since the moves were found")
        return vm

    def _has_room(self, making: _Making, ledger: Ledger, vm: MovableVm, move: Move) -> bool:
        """Whether a VM can get its new cores now, and no other pod waits for room on its node."""
        assert making.node is not None
        machine = self._cache.machine(making.node)
        if isinstance(machine, Unusable) or machine.topology.fingerprint != vm.placed.topology:
            return False
        others = ledger.after(LedgerChange(releases=(vm.pod.uid, making.pod.uid)))
        if any(claim.reserved for claim in others.claims.values()):
            return False
        taken = self._pending.held_on(making.node, but=making.pod.uid)
        return machine.free(others, taken).can_give(claim_of(vm.pod.uid, move.after))

    def _fits_after(self, making: _Making, ledger: Ledger, whole: Claim, moves: Sequence[Move]) -> bool:
        """Whether the VM that waits gets its claim once these moves are made."""
        assert making.node is not None
        machine = self._cache.machine(making.node)
        if isinstance(machine, Unusable):
            return False
        moved = {PodUid(move.id): claim_of(PodUid(move.id), move.after) for move in moves}
        others = ledger.after(LedgerChange(releases=(making.pod.uid, *moved)))
        taken = self._pending.held_on(making.node, but=making.pod.uid)
        return machine.free(others, [*taken, *moved.values()]).can_give(whole)

    def _is_in_force(self, node: NodeName, vm: MovableVm, move: Move) -> bool:
        """Whether a VM has given up its old cores; raises RoomStopped where it could not be moved."""
        claim = self._cache.ledger(node).claims.get(vm.pod.uid)
        if claim is None or (claim.relocation is None and claim.cpus == move.after.cpus):
            return True
        target = vm.placed.revision + 1
        if claim.relocation is None or claim.relocation.next.revision != target:
            raise RoomStopped(f"a VM could not be moved on {node}")
        return False

    async def _until(self, making: _Making, holds: Callable[[], bool], ends: float, what: str) -> None:
        """Wait until something comes true; raises RoomStopped when the moves are of no use, or late."""
        while not holds():
            self._check(making)
            left = ends - self._clock()
            if left <= 0:
                raise RoomStopped(f"a move on {making.node} {what} in time")
            due = making.renewed + RENEW_S - self._clock()
            if due <= 0:
                making.renewed = self._clock()
                assert making.kept is not None
                await making.kept.renew(self._cache.ledgers, self._now())
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, due)):
                    await self._pending.news()

    def _check(self, making: _Making) -> None:
        """Raise RoomStopped when the VM waits no longer, or its reservation has been taken."""
        if not self._waits(making.pod):
            raise RoomStopped("the VM waits no longer")
        assert making.kept is not None
        if making.kept.find(self._cache.ledger(making.kept.node)) is None:
            raise RoomStopped(f"another pod has taken the reserved CPUs on {making.kept.node}")

    def _waits(self, pod: PodRecord) -> bool:
        known = self._cache.pods.get(pod.uid)
        return (
            known is not None
            and not known.node
            and not known.deleting
            and self._pending.hold_of(pod.uid) is None
        )

    def _tell(self, making: _Making, vm: MovableVm, move: Move, which: str) -> None:
        """Write an event about the move on both VMs."""
        pod, mover, node = making.pod, vm.pod, making.node
        way = f"from CPUs {format_cpu_list(move.before.cpus)} to {format_cpu_list(move.after.cpus)} of {node}"
        for_whom = f"this VM moves {way}, to make room for {vm_as_known(pod, mover)}"
        who = f"{vm_as_known(mover, pod)} moves {way}, to make room for this VM, {which}"
        self._events.record(making_room(owner_reference(mover), for_whom))
        self._events.record(making_room(owner_reference(pod), who))
        log.info("%s moves %s, %s", vm_name(mover), way, which, extra=_about(pod, node))


def _may_hold(snapshot: NodeSnapshot, request: Request) -> bool:
    """Whether a node has enough free CPUs, wherever they are."""
    free = snapshot.free
    return (free.cpus if request.owns_cpus else free.pool).bit_count() >= request.vcpus


def _about(pod: PodRecord, node: NodeName | None) -> dict[str, object]:
    return about_pod(pod.uid, pod.namespace, pod.name, vmi=pod.vmi, node=node or NodeName(""))
