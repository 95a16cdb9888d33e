"""The ledgers as this process knows them, and the one way to change them: group commit per node.

Two promises. `current` is never older than this process's own last write, however late the watch is. And
one writer at a time touches a node's ledger: while a write is under way, further changes of that node gather
and go together in the next one. A single change is written at once; changes that follow a write
within a moment gather for that long. Between processes the resource version decides; the one that loses reads
again and decides again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import Counter, Gauge, Histogram

from kvplace.core.claim_changes import grown
from kvplace.core.errors import (
    Conflict,
    Corrupt,
    Forbidden,
    KvplaceError,
    Misconfigured,
    Refused,
    Unavailable,
)
from kvplace.core.ledger import Claim, Ledger, LedgerChange, OwnershipConflict
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.well_known_names import about_pod
from kvplace.kube.api_errors import Backoff, with_retries
from kvplace.kube.list_watch import is_newer
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.store import Store

T = TypeVar("T")

LEDGER_WRITES = Histogram(
    "kvplace_ledger_write_seconds",
    "Time of one write of a node's ledger, with any result.",
    buckets=(0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
LEDGER_CHANGES = Counter(
    "kvplace_ledger_changes_total",
    "Changes that were stored; divided by the writes, how many went together.",
)
LEDGER_LAST_WRITE = Gauge(
    "kvplace_ledger_last_write_timestamp_seconds", "When this replica last changed a ledger, as Unix time."
)
LEDGER_CONFLICTS = Counter(
    "kvplace_ledger_conflicts_total",
    "Lost writes of ledgers: version (conflict with another writer) or owner (a CPU had another owner).",
    ["kind"],
)

LedgerDecision = Callable[[Ledger], tuple[LedgerChange, T]]
"""A pure decision about the ledger at the time of its write: the change, and the answer for the caller.

It may be asked several times; it must search for its own earlier effect first (by pod UID). Raising a
KvplaceError leaves the ledger alone and reaches the caller.
"""


@dataclass(frozen=True, eq=False)
class PendingChange(Generic[T]):
    """A decision that is still to be stored."""

    decide: LedgerDecision[T]
    answer: asyncio.Future[T] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def succeed(self, answer: T) -> None:
        """Give the answer to the caller, unless it has one or has gone."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: KvplaceError) -> None:
        """Raise an error in the caller, unless it has an answer or has gone."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # marks it as seen, even if the caller has gone


@dataclass(frozen=True)
class Batch:
    """The result of a group of pending changes of one ledger."""

    change: LedgerChange
    """Everything to be stored in one write."""
    decided: tuple[tuple[PendingChange[Any], object], ...]
    """The changes in it, each with its answer."""
    failed: tuple[tuple[PendingChange[Any], KvplaceError], ...]
    """The changes with a decision that raised an error."""
    again: tuple[PendingChange[Any], ...]
    """Refused changes that are decided again after this write, because its releases may help them."""


def no_change(_ledger: Ledger) -> tuple[LedgerChange, None]:
    """Decide nothing; released CPUs are still added to reservations."""
    return LedgerChange(), None


def decide_together(ledger: Ledger, pending: Collection[PendingChange[Any]]) -> Batch:
    """Decide each change in turn, each on a ledger that those before it have changed.

    A released claim is gone for the changes after it, but its CPUs keep their owner until the next write:
    the API server compares with the stored owners, so a CPU cannot be released and claimed in one write.
    Before all others come the pods with reserved CPUs that have no owner any more.
    """
    claims: dict[PodUid, Claim] = {claim.uid: claim for claim in grown(ledger)}
    ledger = ledger.after(LedgerChange(claims=tuple(claims.values())))
    releases: dict[PodUid, None] = {}
    decided: list[tuple[PendingChange[Any], object]] = []
    failed: list[tuple[PendingChange[Any], KvplaceError]] = []
    for one in pending:
        try:
            change, answer = one.decide(ledger)
            ledger = ledger.after(LedgerChange(claims=change.claims))
        except KvplaceError as error:
            failed.append((one, error))
            continue
        decided.append((one, answer))
        for uid in change.releases:
            claims.pop(uid, None)
            releases[uid] = None
        claims |= {claim.uid: claim for claim in change.claims}
        if change.releases:
            left = {uid: claim for uid, claim in ledger.claims.items() if uid not in change.releases}
            ledger = Ledger(ledger.owners, left)
    again = tuple(one for one, error in failed if releases and isinstance(error, Refused))
    return Batch(
        LedgerChange(tuple(claims.values()), tuple(releases)),
        tuple(decided),
        tuple((one, error) for one, error in failed if one not in again),
        again,
    )


log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_s=0.1, longest_s=2.0)
ENOUGH = 8
"""Changes of one node that are written together at once, without waiting for more."""


class LedgerClient(Protocol):
    """The cluster calls of the ledgers."""

    async def read_ledger(self, node: NodeName) -> LedgerRecord | None:
        """Read a ledger as the API server has it now; None when there is none."""
        ...

    async def create_ledger(self, node: NodeName) -> LedgerRecord:
        """Create an empty ledger for a node; returns the one that exists already."""
        ...

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        """Change a ledger that still equals `before`; returns the stored result.

        Raises Conflict when it has changed or is gone, OwnershipConflict when a CPU would change hands.
        """
        ...


@dataclass
class _NodeQueue:
    """The changes of one node that are still to be stored."""

    pending: list[PendingChange[Any]] = field(default_factory=list)
    writer: asyncio.Task[None] | None = None
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when so many changes are pending that they do not gather any longer."""

    def add(self, change: PendingChange[Any]) -> None:
        """Put a change at the end."""
        self.pending.append(change)
        if len(self.pending) >= ENOUGH:
            self.enough.set()

    def take(self) -> list[PendingChange[Any]]:
        """Empty the queue, and return its content."""
        taken, self.pending = self.pending, []
        self.enough.clear()
        return taken


class Ledgers:
    """All ledgers, current and changeable."""

    def __init__(
        self,
        cluster: LedgerClient,
        store: Store[NodeName, LedgerRecord],
        *,
        attempts: int = 8,
        gather_seconds: float = 0.3,
        quiet_seconds: float = 0.1,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`gather_seconds` is how long changes gather that follow a write, to any node, as quickly as that.

        They gather no longer once no change to any node has come for `quiet_seconds`: nothing more will join.
        A write costs the API server more than a binding, however many claims go with it. kube-scheduler binds
        in the background, so a bind that gathers delays no other client. It waits for the answer of a
        preemption.
        """
        self._cluster = cluster
        self._records: dict[NodeName, LedgerRecord] = {}
        self._claimed_on: dict[PodUid, set[NodeName]] = {}
        self._reserved_on: set[NodeName] = set()
        self._queues: dict[NodeName, _NodeQueue] = {}
        self._listeners: list[Callable[[NodeName], None]] = []
        self._attempts = attempts
        self._gather_seconds = gather_seconds
        self._quiet_seconds = quiet_seconds
        self._changed_at = float("-inf")
        self._sleep = sleep
        self._written_at = float("-inf")
        self._stopped = False
        self.writes = 0
        self.changes = 0
        store.subscribe(self._on_watch)

    # Reading.

    def current(self, node: NodeName) -> LedgerRecord | None:
        """The newest known ledger of a node; None when it has none yet."""
        return self._records.get(node)

    def nodes_claimed_by(self, uid: PodUid) -> frozenset[NodeName]:
        """The nodes where a pod has a claim; more than one only after a crash or a race."""
        return frozenset(self._claimed_on.get(uid, ()))

    @property
    def nodes_with_reservations(self) -> frozenset[NodeName]:
        """The nodes with a reservation for a waiting pod."""
        return frozenset(self._reserved_on)

    def all(self) -> Iterator[LedgerRecord]:
        """Every known ledger."""
        return iter(list(self._records.values()))

    def subscribe(self, listener: Callable[[NodeName], None]) -> None:
        """Call the listener with the node's name after each change of the result of `current`."""
        self._listeners.append(listener)

    # Changing.

    async def change(self, node: NodeName, decide: LedgerDecision[T], *, at_once: bool = False) -> T:
        """Decide on the node's ledger and store the decision; returns the answer of the decision.

        `at_once` is for a caller that others wait for: the gathered changes go along, and no more gather.
        Raises the errors of the decision, Conflict when others keep winning, Unavailable when the outcome
        stays unknown, and Corrupt when the stored ledger cannot be read.
        """
        if self._stopped:
            raise _stopping(node)
        self._changed_at = asyncio.get_running_loop().time()
        change = PendingChange(decide)
        queue = self._queue(node)
        queue.add(change)
        if at_once:
            queue.enough.set()
        self._start(node, queue)
        return await asyncio.shield(change.answer)

    async def drain(self) -> None:
        """Wait until no write is under way."""
        while tasks := [queue.writer for queue in self._queues.values() if queue.writer is not None]:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End at once, as a crash would: writes under way are given up, and their callers get an error."""
        self._stopped = True
        writers = [queue.writer for queue in self._queues.values() if queue.writer is not None]
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
        for node, queue in self._queues.items():
            _fail_all(queue.take(), _stopping(node))

    # Writing.

    def _queue(self, node: NodeName) -> _NodeQueue:
        return self._queues.setdefault(node, _NodeQueue())

    def _start(self, node: NodeName, queue: _NodeQueue) -> None:
        if queue.writer is None and not self._stopped:
            queue.writer = asyncio.get_running_loop().create_task(self._write_all(node, queue))

    async def _write_all(self, node: NodeName, queue: _NodeQueue) -> None:
        """Write until nothing is pending; then drop the queue, so that none stays of a gone node."""
        loop = asyncio.get_running_loop()
        batch: list[PendingChange[Any]] = []
        try:
            while queue.pending:
                if loop.time() - self._written_at < self._gather_seconds:
                    await self._gather(queue)
                batch = queue.take()
                queue.pending[:0] = await self._write_or_fail(node, batch)
                self._written_at = loop.time()
                batch = []
        except BaseException as error:
            _fail_all(batch, Unavailable(f"writing the ledger of node {node} ended with {error!r}"))
            raise
        finally:
            queue.writer = None
            if queue.pending:
                self._start(node, queue)
            else:
                del self._queues[node]

    async def _gather(self, queue: _NodeQueue) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() + self._gather_seconds
        while (end := min(latest, self._changed_at + self._quiet_seconds)) > loop.time():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end):
                    await queue.enough.wait()
                return

    async def _write_or_fail(
        self, node: NodeName, batch: list[PendingChange[Any]]
    ) -> list[PendingChange[Any]]:
        """Write the batch; when the API server rejects its content, write the changes one by one."""
        try:
            return await self._write(node, batch)
        except KvplaceError as error:
            one_is_at_fault = isinstance(error, Misconfigured) and not isinstance(error, Forbidden)
            if one_is_at_fault and len(batch) > 1:
                return [again for one in batch for again in await self._write_or_fail(node, [one])]
            _fail_all(batch, error)
            return []

    async def _write(self, node: NodeName, batch: list[PendingChange[Any]]) -> list[PendingChange[Any]]:
        """Store the decisions of the batch; returns the changes that are to be decided again after it.

        After a lost or unanswered write the ledger is read, which shows the write that counts. So it is for a
        conflict that a decision finds in the ledger as the watch has reported it, which may be late.
        """
        record = self.current(node)

        async def attempt() -> list[PendingChange[Any]]:
            nonlocal record
            told, record = record, None
            # Changes with an answer are not decided again: a refused pod must not get a claim.
            pending = [one for one in batch if not one.answer.done()]
            return await self._store(told or await self._read(node), pending, may_be_old=told is not None)

        return await with_retries(attempt, attempts=self._attempts, backoff=_BACKOFF, sleep=self._sleep)

    async def _store(
        self, record: LedgerRecord, pending: list[PendingChange[Any]], *, may_be_old: bool
    ) -> list[PendingChange[Any]]:
        if record.problem:
            raise Corrupt(f"the ledger of node {record.node} cannot be read: {record.problem}")
        batch = decide_together(record.ledger, pending)
        if may_be_old and (found := [one for _, one in batch.failed if isinstance(one, Conflict)]):
            raise found[0]
        for one, error in batch.failed:
            one.fail(error)
        if batch.change:
            try:
                with LEDGER_WRITES.time():
                    written = await self._cluster.write_ledger(record, batch.change)
            except KvplaceError as error:
                if isinstance(error, Conflict):
                    LEDGER_CONFLICTS.labels(
                        "owner" if isinstance(error, OwnershipConflict) else "version"
                    ).inc()
                _log_lost(record.node, batch.change, error)
                raise
            self.writes += 1
            self.changes += len(batch.decided)
            LEDGER_CHANGES.inc(len(batch.decided))
            LEDGER_LAST_WRITE.set_to_current_time()
            self._keep(written)
        for one, answer in batch.decided:
            one.succeed(answer)
        return [*self._take_over(record.node), *batch.again] if batch.change else list(batch.again)

    def _take_over(self, node: NodeName) -> list[PendingChange[Any]]:
        """Give CPUs that were just released to their reservations, by the next write and at once."""
        record = self.current(node)
        if record is None or not any(grown(record.ledger)):
            return []
        self._queue(node).enough.set()
        return [PendingChange(no_change)]

    async def _read(self, node: NodeName) -> LedgerRecord:
        record = await self._cluster.read_ledger(node) or await self._cluster.create_ledger(node)
        self._keep(record)
        return record

    # Knowing.

    def _on_watch(self, before: LedgerRecord | None, after: LedgerRecord | None) -> None:
        if after is not None:
            self._keep(after)
        elif before is not None:
            self._forget(before)

    def _keep(self, record: LedgerRecord) -> None:
        known = self._records.get(record.node)
        if known is not None and not is_newer(record.resource_version, known.resource_version):
            return
        self._records[record.node] = record
        self._changed(record.node, known.ledger.claims if known else {}, record.ledger.claims)

    def _forget(self, record: LedgerRecord) -> None:
        known = self._records.get(record.node)
        if known is None or known.uid != record.uid:
            return
        del self._records[record.node]
        self._changed(record.node, known.ledger.claims, {})

    def _changed(self, node: NodeName, before: Collection[PodUid], after: Mapping[PodUid, Claim]) -> None:
        is_reserved = any(claim.reserved is not None for claim in after.values())
        (self._reserved_on.add if is_reserved else self._reserved_on.discard)(node)
        for uid in set(before).difference(after):
            nodes = self._claimed_on.get(uid, set())
            nodes.discard(node)
            if not nodes:
                self._claimed_on.pop(uid, None)
        for uid in set(after).difference(before):
            self._claimed_on.setdefault(uid, set()).add(node)
        for listener in self._listeners:
            listener(node)


def _log_lost(node: NodeName, change: LedgerChange, error: KvplaceError) -> None:
    """Write one line for each pod with a claim to change."""
    for claim in change.claims:
        about = about_pod(claim.uid, claim.namespace, claim.pod, vmi=claim.vmi, node=node)
        log.info("the claim was not stored: %s", error, extra=about)
    for uid in change.releases:
        log.info("the claim was not released: %s", error, extra=about_pod(uid, node=node))


def _fail_all(pending: Iterable[PendingChange[Any]], error: KvplaceError) -> None:
    for one in pending:
        one.fail(error)


def _stopping(node: NodeName) -> Unavailable:
    return Unavailable(f"the ledger of node {node} is not written any more: this process is stopping")
