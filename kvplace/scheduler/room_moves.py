"""The moves of running VMs that make room for one waiting VM on one node, one after the other.

Each move begins with one write of the node's ledger. The controller and the node's agent then carry it out
like every relocation. The first write also reserves the CPUs of the waiting VM, so every replica can bind it
there, also after the end of this one. The next move begins when the last one is in effect.

`first_write` and `is_in_effect` decide, from their arguments alone; `RoomMoves` reads, writes and waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from kvplace.core.claim_changes import claim_while_relocating, reserve
from kvplace.core.cluster.room_in_cluster import RoomOnNode
from kvplace.core.cpuset import format_cpu_list, union
from kvplace.core.ledger import Claim, Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.moves.make_room import Move
from kvplace.core.quantity import counted
from kvplace.core.scalars import PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.movable_vms import MovableVm, MovableVms
from kvplace.nodes.node_machine import NodeMachine, Unusable
from kvplace.scheduler import limits
from kvplace.scheduler.metrics import ROOM_MOVES
from kvplace.scheduler.reservations import (
    OwnReservation,
    RoomContext,
    RoomStopped,
    about,
    changed,
    check_unchanged,
    future_claim,
    given_back,
    tell_both,
    until_when,
    without,
)
from kvplace.scheduler.stored_claims import rfc3339

log = logging.getLogger(__name__)


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
    others = without(ledger, (vm.pod.uid, whole.uid))
    if any(claim.reserved for claim in others.claims.values()):
        return None
    if not machine.can_give(claim_of(vm.pod.uid, move.after), others, taken):
        return None
    moved = {PodUid(one.id): claim_of(PodUid(one.id), one.after) for one in moves}
    if not machine.can_give(whole, without(ledger, (whole.uid, *moved)), [*taken, *moved.values()]):
        return None
    passed = union(one.after.owned for one in moves)
    return LedgerChange(claims=(moving_claim(vm, move), reserve(ledger, whole, but=passed, until=until)))


def is_in_effect(claim: Claim | None, vm: MovableVm, move: Move) -> bool:
    """Whether the VM of a move has given up its old cores or has ended, by its present claim.

    Raises RoomStopped if the move was undone.
    """
    if claim is None or (claim.relocation is None and claim.cpus == move.after.cpus):
        return True
    if claim.relocation is None or claim.relocation.next.revision != vm.placed.revision + 1:
        raise RoomStopped(f"a VM could not be moved on {vm.pod.node}")
    return False


class RoomMoves:
    """Carries out the moves for one VM."""

    def __init__(self, context: RoomContext, pod: PodRecord, room: RoomOnNode) -> None:
        """`pod` waits for `room`."""
        self._context = context
        self._pod = pod
        self._node = room.node
        self._moves = room.plan.moves
        self._vms = MovableVms(context.cache)
        self._kept = OwnReservation(room.node, pod.uid, rfc3339(context.now()))
        self._whole = future_claim(pod, room.plan.placement, self._kept.since)
        self._renewed: float | None = None
        """When the reservation was written last; None before the first move."""

    async def carry_out(self) -> None:
        """Make the moves and wait for the bind; raises RoomStopped or a KvplaceError if not all were made.

        Only the moves that were begun are then completed or undone, and nothing is reserved.
        """
        log.info("room is made by %s", counted(len(self._moves), "move"), extra=about(self._pod, self._node))
        clock = self._context.clock
        async with given_back(self._context.cache.ledgers, self._kept):
            ends = clock() + limits.MOVES_S
            for number, move in enumerate(self._moves, 1):
                vm = await self._begin(self._moves[number - 1 :])
                ROOM_MOVES.inc()
                self._tell(vm, move, number)
                while not is_in_effect(self._ledger.claims.get(vm.pod.uid), vm, move):
                    await self._pause(ends, "was not confirmed")
            ends = clock() + limits.BOUND_AFTER_MOVES_S
            with contextlib.suppress(RoomStopped):
                while True:
                    await self._pause(ends, "was not bound")

    @property
    def _ledger(self) -> Ledger:
        return self._context.cache.ledger(self._node)

    async def _begin(self, left: Sequence[Move]) -> MovableVm:
        """Begin the first of the moves that are left; returns its VM."""
        node, move, pod, cache = self._node, left[0], self._pod, self._context.cache
        vm = self._vms.find(node, PodUid(move.id))
        if vm is None or vm.placed.placement != move.before:
            raise changed(node)
        await check_unchanged(self._context.cluster, vm)
        self._check_waits()
        is_first, self._renewed = self._renewed is None, self._context.clock()
        moving, until = moving_claim(vm, move), until_when(self._context.now())

        def decide(ledger: Ledger) -> tuple[LedgerChange, bool]:
            known = ledger.claims.get(pod.uid)
            if known is not None and self._kept.find(ledger) == known:
                if ledger.claims.get(vm.pod.uid) == moving:
                    return LedgerChange(), True  # by an earlier write of ours without an answer
            elif known is not None or not is_first:
                return LedgerChange(), False
            machine, taken = cache.machine(node), self._context.pending.held_on(node, but=pod.uid)
            if isinstance(machine, Unusable):
                return LedgerChange(), False
            change = first_write(ledger, machine, taken, self._whole, vm, left, until=until)
            return change or LedgerChange(), change is not None

        if not await cache.ledgers.change(node, decide):
            raise RoomStopped(f"{node} has changed since the moves were found")
        return vm

    def _check_waits(self) -> None:
        if not self._context.pending.needs_room(self._pod.uid):
            raise RoomStopped("the VM waits no longer")

    async def _pause(self, ends: float, what: str) -> None:
        """Renew the reservation if that is due, or wait for a change of ledgers or pods.

        Raises RoomStopped when the moves are of no use, or late.
        """
        self._check_waits()
        if self._kept.find(self._ledger) is None:
            raise RoomStopped(f"another pod has taken the reserved CPUs on {self._node}")
        now = self._context.clock()
        if now >= ends:
            raise RoomStopped(f"a move on {self._node} {what} in time")
        due = (self._renewed or now) + limits.RENEW_S - now
        if due <= 0:
            self._renewed = now
            await self._kept.renew(self._context.cache.ledgers, self._context.now())
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(ends - now, due)):
                await self._context.pending.waiting.news()

    def _tell(self, vm: MovableVm, move: Move, number: int) -> None:
        before, after = format_cpu_list(move.before.cpus), format_cpu_list(move.after.cpus)
        which = f", move {number} of {len(self._moves)}"
        does = f"moves from CPUs {before} to {after} of {self._node}"
        tell_both(self._context.events, vm.pod, self._pod, does, to_waiting=which)
