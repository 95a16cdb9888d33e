"""The moves of running VMs that make room for one waiting VM on one node, one after the other.

Each move begins with one write of the node's ledger. The controller and the node's agent then carry it out
like every relocation. The first write also reserves the CPUs of the waiting VM (`core/claim_changes.py`), so
every replica can bind it there, also after the end of this one. The next move begins when the last one is in
effect.

`first_write` and `state_of_move` decide, from their arguments alone; `RoomMoves` reads, writes and waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import datetime
from enum import Enum

from kvplace.core.claim_changes import claim_while_relocating, reserve
from kvplace.core.cluster.room_in_cluster import RoomOnNode
from kvplace.core.cpuset import format_cpu_list, union
from kvplace.core.errors import KvplaceError
from kvplace.core.ledger import Claim, Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.moves.make_room import Move
from kvplace.core.quantity import counted
from kvplace.core.scalars import PodUid
from kvplace.core.well_known_names import about_pod
from kvplace.kube.events import EventRecorder, making_room, owner_reference
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeMachine, Unusable
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.metrics import ROOM_MOVES
from kvplace.scheduler.migrator import vm_as_known, vm_name
from kvplace.scheduler.movable_vms import MovableVm, MovableVms
from kvplace.scheduler.pending_pods import PendingPods
from kvplace.scheduler.stored_claims import RENEW_S, OwnReservation, RoomStopped, rfc3339, until_when

log = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""The longest time of all moves for one VM; then they are given up."""
_BOUND_S = 30.0
"""The longest time from the last move to the bind of the waiting VM."""


class MoveState(Enum):
    """The state of a move that was begun."""

    UNDER_WAY = "under way"
    IN_EFFECT = "in effect"
    """The VM has given up its old cores, or has ended."""
    UNDONE = "undone"


def moving_claim(vm: MovableVm, move: Move) -> Claim:
    """Return the claim of a VM that gets its new cores and keeps its present ones meanwhile."""
    following = replace(vm.placed, placement=move.after, revision=vm.placed.revision + 1, options=vm.options)
    return claim_while_relocating(vm.claim, Relocation(following, vm.placed))


def first_write(
    ledger: Ledger,
    machine: NodeMachine,
    taken: Collection[Claim],
    whole: Claim,
    vm: MovableVm,
    moves: Sequence[Move],
    *,
    until: str,
) -> LedgerChange | None:
    """Begin the first of the moves that are left, and reserve the free part of the `whole` claim.

    `taken` are the holds of other pods. None if the node has changed since the moves were found: the VM has
    another claim or cannot get its new cores, another reservation exists, or the waiting VM would not fit.
    """
    move = moves[0]
    if ledger.claims.get(vm.pod.uid) != vm.claim or machine.topology.fingerprint != vm.placed.topology:
        return None
    others = ledger.after(LedgerChange(releases=(vm.pod.uid, whole.uid)))
    if any(claim.reserved for claim in others.claims.values()):
        return None
    if not machine.can_give(claim_of(vm.pod.uid, move.after), others, taken):
        return None
    moved = {PodUid(one.id): claim_of(PodUid(one.id), one.after) for one in moves}
    others = ledger.after(LedgerChange(releases=(whole.uid, *moved)))
    if not machine.can_give(whole, others, [*taken, *moved.values()]):
        return None
    passed = union(one.after.owned for one in moves)
    return LedgerChange(claims=(moving_claim(vm, move), reserve(ledger, whole, but=passed, until=until)))


def state_of_move(claim: Claim | None, vm: MovableVm, move: Move) -> MoveState:
    """Return the state of a move by the present claim of its VM; None stands for a VM that has ended."""
    if claim is None or (claim.relocation is None and claim.cpus == move.after.cpus):
        return MoveState.IN_EFFECT
    if claim.relocation is None or claim.relocation.next.revision != vm.placed.revision + 1:
        return MoveState.UNDONE
    return MoveState.UNDER_WAY


class RoomMoves:
    """Carries out the moves for one VM."""

    def __init__(
        self,
        cluster: SchedulerClient,
        cache: NodeCache,
        pending: PendingPods,
        events: EventRecorder,
        pod: PodRecord,
        room: RoomOnNode,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        """`pod` waits for `room`; `now` dates the reservation, `clock` times how long moves may take."""
        self._cluster = cluster
        self._cache = cache
        self._pending = pending
        self._events = events
        self._pod = pod
        self._node = room.node
        self._moves = room.plan.moves
        self._now = now
        self._clock = clock
        self._vms = MovableVms(cache)
        self._kept = OwnReservation(room.node, pod.uid, rfc3339(now()))
        self._whole = claim_of(
            pod.uid,
            room.plan.placement,
            namespace=pod.namespace,
            pod=pod.name,
            vmi=pod.vmi,
            since=self._kept.since,
        )
        self._renewed: float | None = None
        """When the reservation was written last; None before the first move."""

    async def carry_out(self) -> None:
        """Make the moves and wait for the bind; raises RoomStopped or a KvplaceError if not all were made.

        Only the moves that were begun are then completed or undone, and nothing is reserved.
        """
        log.info("room is made by %s", counted(len(self._moves), "move"), extra=_about(self._pod, self._node))
        try:
            await self._make_moves()
            await self._wait_for_bind()
        except (RoomStopped, KvplaceError):
            await self._kept.give_back(self._cache.ledgers)
            raise
        await self._kept.give_back(self._cache.ledgers)

    async def _make_moves(self) -> None:
        ends = self._clock() + PATIENCE_S
        for number, move in enumerate(self._moves, 1):
            vm = await self._begin(self._moves[number - 1 :])
            ROOM_MOVES.inc()
            self._tell(vm, move, f"move {number} of {len(self._moves)}")
            while not self._is_in_effect(vm, move):
                await self._pause(ends, "was not confirmed")

    async def _wait_for_bind(self) -> None:
        ends = self._clock() + _BOUND_S
        with contextlib.suppress(RoomStopped):
            while self._pending.needs_room(self._pod.uid):
                await self._pause(ends, "was not bound")

    async def _begin(self, left: Sequence[Move]) -> MovableVm:
        """Begin the first of the moves that are left; returns its VM.

        The VM is read first, as the cache may be older than a relocation that has just ended.
        """
        node, move, pod = self._node, left[0], self._pod
        vm = self._vms.find(node, PodUid(move.id), self._vms.migrating())
        if vm is None or vm.placed.placement != move.before:
            raise RoomStopped(f"a VM on {node} that was to move has changed")
        live = await self._cluster.read_pod(vm.pod.namespace, vm.pod.name)
        if live is None or (live.uid, live.placement, live.deleting) != (vm.pod.uid, vm.pod.placement, False):
            raise RoomStopped(f"a VM on {node} that was to move has changed")
        if not self._pending.needs_room(pod.uid):
            raise RoomStopped("the VM waits no longer")
        is_first, self._renewed = self._renewed is None, self._clock()
        moving, until = moving_claim(vm, move), until_when(self._now())

        def decide(ledger: Ledger) -> tuple[LedgerChange, bool]:
            known = ledger.claims.get(pod.uid)
            if known is not None and self._kept.find(ledger) == known:
                if ledger.claims.get(vm.pod.uid) == moving:
                    return LedgerChange(), True  # by an earlier write of ours without an answer
            elif known is not None or not is_first:
                return LedgerChange(), False
            machine, taken = self._cache.machine(node), self._pending.held_on(node, but=pod.uid)
            if isinstance(machine, Unusable):
                return LedgerChange(), False
            change = first_write(ledger, machine, taken, self._whole, vm, left, until=until)
            return change or LedgerChange(), change is not None

        if not await self._cache.ledgers.change(node, decide):
            raise RoomStopped(f"{node} has changed since the moves were found")
        return vm

    def _is_in_effect(self, vm: MovableVm, move: Move) -> bool:
        state = state_of_move(self._cache.ledger(self._node).claims.get(vm.pod.uid), vm, move)
        if state is MoveState.UNDONE:
            raise RoomStopped(f"a VM could not be moved on {self._node}")
        return state is MoveState.IN_EFFECT

    async def _pause(self, ends: float, what: str) -> None:
        """Renew the reservation if that is due, or wait for a change of ledgers or pods.

        Raises RoomStopped when the moves are of no use, or late.
        """
        if not self._pending.needs_room(self._pod.uid):
            raise RoomStopped("the VM waits no longer")
        if self._kept.find(self._cache.ledger(self._node)) is None:
            raise RoomStopped(f"another pod has taken the reserved CPUs on {self._node}")
        now = self._clock()
        if now >= ends:
            raise RoomStopped(f"a move on {self._node} {what} in time")
        due = (self._renewed or now) + RENEW_S - now
        if due <= 0:
            self._renewed = now
            await self._kept.renew(self._cache.ledgers, self._now())
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(ends - now, due)):
                await self._pending.news()

    def _tell(self, vm: MovableVm, move: Move, which: str) -> None:
        """Write an event about the move on both VMs."""
        pod, mover, node = self._pod, vm.pod, self._node
        way = f"from CPUs {format_cpu_list(move.before.cpus)} to {format_cpu_list(move.after.cpus)} of {node}"
        for_whom = f"this VM moves {way}, to make room for {vm_as_known(pod, mover)}"
        who = f"{vm_as_known(mover, pod)} moves {way}, to make room for this VM, {which}"
        self._events.record(making_room(owner_reference(mover), for_whom))
        self._events.record(making_room(owner_reference(pod), who))
        log.info("%s moves %s, %s", vm_name(mover), way, which, extra=_about(pod, node))


def _about(pod: PodRecord, node: str) -> dict[str, object]:
    return about_pod(pod.uid, pod.namespace, pod.name, vmi=pod.vmi, node=node)
