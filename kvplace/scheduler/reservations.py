"""Reservations for a VM that waits, while others end, move or migrate for it.

Evictions, moves and migrations have this in common: they first reserve the cores in the ledgers, so that no
replica gives them to another pod (`core/claim_changes.py`). The replica that makes room renews its
reservations, and gives them back at the end of its attempt. If it crashes, they end by themselves.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from kvplace.core.claim_changes import RESERVED_S, kept_for, reserve
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.errors import Conflict, KvplaceError, Unavailable
from kvplace.core.ledger import Claim, Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement
from kvplace.core.scalars import NO_CPUS, NodeName, PodUid
from kvplace.core.well_known_names import about_pod
from kvplace.kube.events import EventReason, EventRecord, EventRecorder, owner_reference
from kvplace.kube.ledgers import Ledgers
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.movable_vms import MovableVm
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeMachine, Unusable
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.pending_pods import PendingPods

log = logging.getLogger(__name__)

Background: TypeAlias = Callable[..., Awaitable[Any]]
"""Runs a computation with its arguments beside the event loop, as `asyncio.to_thread` does."""


class RoomStopped(Exception):
    """No room is made for a VM any more; the message is the reason in one clause."""


@dataclass(frozen=True, slots=True)
class RoomContext:
    """The parts of the scheduler that evictions, moves and migrations need."""

    cluster: SchedulerClient
    cache: NodeCache
    pending: PendingPods
    events: EventRecorder
    strategy: Strategy
    now: Callable[[], datetime]
    """Dates reservations, and is compared with dates of objects."""
    clock: Callable[[], float]
    """Times waits and pauses, in seconds."""
    background: Background
    """Runs searches."""


@dataclass(frozen=True, slots=True)
class OwnReservation:
    """A reservation by its place, and by the date of the attempt: no two attempts make equal ones."""

    node: NodeName
    uid: PodUid
    """Its key: the UID of the waiting pod, or of the VMI that migrates."""
    since: str

    def find(self, ledger: Ledger) -> Claim | None:
        """Return it in the ledger of its node, unless it has become a claim, or is another attempt's."""
        claim = ledger.claims.get(self.uid)
        is_ours = claim is not None and claim.reserved is not None and claim.since == self.since
        return claim if is_ours else None

    async def take(
        self, cache: NodeCache, change: Callable[[Ledger, NodeMachine], LedgerChange | None]
    ) -> bool:
        """Write it at once, by the `change` to a ledger; whether it is there then.

        An earlier write without an answer may have made it. `change` returns None if the node has changed.
        """

        def decide(ledger: Ledger) -> tuple[LedgerChange, bool]:
            if self.uid in ledger.claims:
                return LedgerChange(), self.find(ledger) is not None
            machine = cache.machine(self.node)
            made = None if isinstance(machine, Unusable) else change(ledger, machine)
            return made or LedgerChange(), made is not None

        return await cache.ledgers.change(self.node, decide, at_once=True)

    async def renew(self, ledgers: Ledgers, now: datetime) -> None:
        """Begin its time again; if that fails, the next time may do."""

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            claim = self.find(ledger)
            if claim is None or claim.reserved is None:
                return LedgerChange(), None
            renewed = replace(claim.reserved, until=until_when(now))
            return LedgerChange(claims=(replace(claim, reserved=renewed),)), None

        with contextlib.suppress(Conflict, Unavailable):
            await ledgers.change(self.node, decide)

    async def give_back(self, ledgers: Ledgers) -> None:
        """End it, if it is still there; if that fails, it ends by itself."""

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            return LedgerChange(releases=() if self.find(ledger) is None else (self.uid,)), None

        try:
            await ledgers.change(self.node, decide)
        except KvplaceError as error:
            log.info("a reservation is left to end by itself: %s", error, extra={"node": self.node})


@contextlib.asynccontextmanager
async def given_back(ledgers: Ledgers, *kept: OwnReservation) -> AsyncIterator[None]:
    """End reservations with the attempt in the block, unless they have become claims by then.

    An attempt that is cancelled leaves them to end by themselves: its process ends, too.
    """
    try:
        yield
    except (RoomStopped, KvplaceError):
        for one in kept:
            await one.give_back(ledgers)
        raise
    for one in kept:
        await one.give_back(ledgers)


def until_when(now: datetime, seconds: float = RESERVED_S) -> str:
    """Return when a reservation that is written now ends, for people."""
    return (now + timedelta(seconds=seconds)).isoformat(timespec="seconds").replace("+00:00", "Z")


def future_claim(pod: PodRecord, placement: Placement, since: str) -> Claim:
    """Return the claim that a waiting pod gets with a placement; `since` dates the attempt."""
    return claim_of(pod.uid, placement, namespace=pod.namespace, pod=pod.name, vmi=pod.vmi, since=since)


def reserve_what_leaves(
    ledger: Ledger,
    machine: NodeMachine,
    taken: Iterable[Claim],
    whole: Claim,
    leaving: Collection[PodUid],
    *,
    until: str,
) -> Claim | None:
    """Reserve the future claim of a pod that gets it when others have left; None if it would not fit then.

    `taken` are the holds of other pods.
    """
    free = machine.free(without(ledger, leaving), taken)
    if not free.can_give(whole):
        return None
    return reserve(ledger, kept_for(whole, ledger, free), but=NO_CPUS, until=until)


def without(ledger: Ledger, gone: Collection[PodUid]) -> Ledger:
    """Return a ledger without the claims of pods."""
    return ledger.after(LedgerChange(releases=tuple(gone))) if gone else ledger


async def check_unchanged(cluster: SchedulerClient, vm: MovableVm) -> None:
    """Read a VM that is about to move; raises RoomStopped if it has changed.

    The cache may be older than a relocation that has just ended.
    """
    live = await cluster.read_pod(vm.pod.namespace, vm.pod.name)
    if live is None or (live.uid, live.placement, live.deleting) != (vm.pod.uid, vm.pod.placement, False):
        raise changed(vm.pod.node)


def changed(node: NodeName) -> RoomStopped:
    """Return the error for a node where a VM that was to move has changed."""
    return RoomStopped(f"a VM on {node} that was to move has changed")


def tell_both(
    events: EventRecorder,
    mover: PodRecord,
    waiting: PodRecord,
    does: str,
    *,
    to_mover: str = "",
    to_waiting: str = "",
) -> None:
    """Write an event on the VM that moves and on the VM that it moves for: "this VM `does`"."""
    for_whom = f"this VM {does}, to make room for {_as_known(waiting, mover)}{to_mover}"
    who = f"{_as_known(mover, waiting)} {does}, to make room for this VM{to_waiting}"
    events.record(EventRecord(owner_reference(mover), EventReason.MAKING_ROOM, for_whom))
    events.record(EventRecord(owner_reference(waiting), EventReason.MAKING_ROOM, who))
    log.info("%s %s%s", _name(mover), does, to_waiting, extra=about(waiting, mover.node))


def _as_known(one: PodRecord, by: PodRecord) -> str:
    """Name a VM for the owner of another VM, without names of other namespaces."""
    return _name(one) if one.namespace == by.namespace else "a VM of another namespace"


def _name(pod: PodRecord) -> str:
    return f"{pod.namespace}/{pod.vm}"


def about(pod: PodRecord, node: str = "") -> dict[str, object]:
    """Return the fields of a log line about a waiting VM."""
    return about_pod(pod.uid, pod.namespace, pod.name, vmi=pod.vmi, node=node)
