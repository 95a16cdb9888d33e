"""The ledgers as this process knows them, and the one way to change them: group commit per node.

Two promises. `current` is never older than this process's own last write, whatever the watch is late
by. And one writer at a time touches a node's ledger: while a write is under way, further changes of
that node gather and go together in the next. In a burst of writes they gather a moment longer; a change
that comes alone is written at once. Between processes the resource version decides; whoever loses reads
again and decides again, on what is true then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvplace.core.errors import Conflict, Forbidden, KvplaceError, Misconfigured, Refused, Unavailable
from kvplace.core.ledger import Claim, Ledger, LedgerChange
from kvplace.kube.cluster import Cluster
from kvplace.kube.records import LedgerRecord
from kvplace.kube.store import Store

T = TypeVar("T")
log = logging.getLogger(__name__)

Decision = Callable[[Ledger], tuple[LedgerChange, T]]
"""A pure question to the ledger as it will be: what to change, and what to answer the asker.

It may be asked several times; it must look for its own earlier effect first (by pod UID). Raising a
KvplaceError leaves the ledger alone and reaches the asker.
"""


@dataclass(frozen=True, eq=False)
class _Wish(Generic[T]):
    decide: Decision[T]
    awaited: bool = True
    answer: asyncio.Future[T] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _NodeQueue:
    def __init__(self) -> None:
        self.wishes: list[_Wish[Any]] = []
        self.lazy: list[_Wish[Any]] = []
        self.writer: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None


class Ledgers:
    """All ledgers, current and changeable."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store[str, LedgerRecord],
        *,
        attempts: int = 8,
        lazy_seconds: float = 3.0,
        gather_seconds: float = 0.1,
    ) -> None:
        """`gather_seconds` is how long changes gather that follow a write, to any node, as quickly as that.

        A write costs the API server ten times what a binding does, however many claims go with it.
        """
        self._cluster = cluster
        self._records: dict[str, LedgerRecord] = {}
        self._claimed_on: dict[str, set[str]] = {}
        self._queues: dict[str, _NodeQueue] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._attempts = attempts
        self._lazy_seconds = lazy_seconds
        self._gather_seconds = gather_seconds
        self._written_at = float("-inf")
        self._stopped = False
        self._waiting = 0
        self.writes = 0
        self.changes = 0
        store.subscribe(self._seen)

    # Reading.

    def current(self, node: str) -> LedgerRecord | None:
        """The newest known ledger of a node; None when it has none yet."""
        return self._records.get(node)

    def nodes_claimed_by(self, uid: str) -> frozenset[str]:
        """The nodes on which a pod has a claim; more than one only after a crash or a race."""
        return frozenset(self._claimed_on.get(uid, ()))

    def all(self) -> Iterator[LedgerRecord]:
        """Every known ledger."""
        return iter(list(self._records.values()))

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Call the listener with the node's name after each change of what `current` says."""
        self._listeners.append(listener)

    # Changing.

    async def change(self, node: str, decide: Decision[T]) -> T:
        """Decide on the node's ledger and store the decision; answers what the decision answered.

        Raises what the decision raises, Conflict when others keep winning, or Unavailable when the
        outcome stays unknown.
        """
        if self._stopped:
            raise Unavailable(f"the ledger of node {node} is written no more: this process ends")
        wish = _Wish(decide)
        queue = self._queue(node)
        queue.wishes.append(wish)
        self._start(node, queue)
        self._waiting += 1
        try:
            return await asyncio.shield(wish.answer)
        finally:
            self._waiting -= 1

    def change_later(self, node: str, decide: Decision[None]) -> None:
        """Let a decision go along with the next write to the node, or alone after some seconds.

        For bookkeeping that nobody waits for; its errors are logged.
        """
        queue = self._queue(node)
        queue.lazy.append(_Wish(decide, awaited=False))
        if queue.timer is None and queue.writer is None and not self._stopped:
            queue.timer = asyncio.get_running_loop().call_later(self._lazy_seconds, self._start, node, queue)

    async def drain(self) -> None:
        """Wait until no write is under way."""
        while tasks := [queue.writer for queue in self._queues.values() if queue.writer is not None]:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End at once, as a crash would: writes under way are given up, whoever waits for one is told."""
        self._stopped = True
        writers = [queue.writer for queue in self._queues.values() if queue.writer is not None]
        for queue in self._queues.values():
            if queue.timer is not None:
                queue.timer.cancel()
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)

    # Inside.

    def _queue(self, node: str) -> _NodeQueue:
        return self._queues.setdefault(node, _NodeQueue())

    def _start(self, node: str, queue: _NodeQueue) -> None:
        if queue.timer is not None:
            queue.timer.cancel()
            queue.timer = None
        if queue.writer is None and not self._stopped:
            queue.writer = asyncio.get_running_loop().create_task(self._write_all(node, queue))

    async def _write_all(self, node: str, queue: _NodeQueue) -> None:
        loop = asyncio.get_running_loop()
        try:
            while queue.wishes or queue.lazy:
                in_a_burst = self._waiting > 1 and loop.time() - self._written_at < self._gather_seconds
                if in_a_burst:
                    await asyncio.sleep(self._gather_seconds)
                batch = queue.wishes + queue.lazy
                queue.wishes, queue.lazy = [], []
                try:
                    queue.wishes[:0] = await self._write_or_fail(node, batch)
                except BaseException as error:
                    for wish in batch:
                        _fail(wish, Unavailable(f"writing the ledger of node {node} ended in {error!r}"))
                    raise
                self._written_at = loop.time()
        finally:
            queue.writer = None
            if self._stopped:
                for wish in queue.wishes + queue.lazy:
                    _fail(
                        wish, Unavailable(f"the ledger of node {node} is written no more: this process ends")
                    )
            elif queue.wishes or queue.lazy:
                self._start(node, queue)

    async def _write_or_fail(self, node: str, batch: list[_Wish[Any]]) -> list[_Wish[Any]]:
        """Write the batch; when the API server finds its content invalid, find out by whose fault."""
        try:
            return await self._write(node, batch)
        except KvplaceError as error:
            one_is_at_fault = isinstance(error, Misconfigured) and not isinstance(error, Forbidden)
            if one_is_at_fault and len(batch) > 1:
                return [again for wish in batch for again in await self._write_or_fail(node, [wish])]
            for wish in batch:
                _fail(wish, error)
            return []

    async def _write(self, node: str, batch: list[_Wish[Any]]) -> list[_Wish[Any]]:
        """Store what the batch decides; answers the wishes that the releases just stored may now help."""
        record = self.current(node) or await self._read_again(node)
        failure: KvplaceError = Conflict(f"the ledger of node {node} is written by others all the time")
        for attempt in range(self._attempts):
            if record.problem:
                raise Unavailable(f"the ledger of node {node} cannot be read: {record.problem}")
            decided, failed = _decide_all(record.ledger, batch)
            change = _joined([change for _, change, _ in decided])
            again = [wish for wish, error in failed if change.releases and isinstance(error, Refused)]
            for wish, error in failed:
                if wish not in again:
                    _fail(wish, error)
            if not change:
                for wish, _, answer in decided:
                    _answer(wish, answer)
                return []
            try:
                written = await self._cluster.write_ledger(record, change)
            except (Conflict, Unavailable) as error:
                failure = error
                log.info("ledger write lost, deciding again", extra={"node": node, "attempt": attempt + 1})
                if isinstance(error, Unavailable):
                    await asyncio.sleep(min(0.05 * 2**attempt, 1.0))
                record = await self._read_again(node)
                batch = [wish for wish in batch if not wish.answer.done()]
                continue
            self.writes += 1
            self.changes += len(decided)
            self._keep(written)
            for wish, _, answer in decided:
                _answer(wish, answer)
            return again
        raise failure

    async def _read_again(self, node: str) -> LedgerRecord:
        for attempt in range(self._attempts):
            try:
                record = await self._cluster.read_ledger(node) or await self._cluster.create_ledger(node)
            except Unavailable:
                if attempt == self._attempts - 1:
                    raise
                await asyncio.sleep(min(0.05 * 2**attempt, 1.0))
                continue
            self._keep(record)
            return record
        raise Unavailable(f"the ledger of node {node} could not be read")

    def _seen(self, before: LedgerRecord | None, after: LedgerRecord | None) -> None:
        if after is not None:
            self._keep(after)
        elif before is not None:
            self._forget(before)

    def _keep(self, record: LedgerRecord) -> None:
        known = self._records.get(record.node)
        if known is not None and not _is_newer(record, known):
            return
        self._index(record.node, known.ledger.claims if known else {}, record.ledger.claims)
        self._records[record.node] = record
        for listener in self._listeners:
            listener(record.node)

    def _forget(self, record: LedgerRecord) -> None:
        known = self._records.get(record.node)
        if known is None or known.uid != record.uid:
            return
        self._index(record.node, known.ledger.claims, {})
        del self._records[record.node]
        for listener in self._listeners:
            listener(record.node)

    def _index(self, node: str, before: Mapping[str, object], after: Mapping[str, object]) -> None:
        for uid in before.keys() - after.keys():
            nodes = self._claimed_on.get(uid, set())
            nodes.discard(node)
            if not nodes:
                self._claimed_on.pop(uid, None)
        for uid in after.keys() - before.keys():
            self._claimed_on.setdefault(uid, set()).add(node)


def _decide_all(
    ledger: Ledger, batch: list[_Wish[Any]]
) -> tuple[list[tuple[_Wish[Any], LedgerChange, object]], list[tuple[_Wish[Any], KvplaceError]]]:
    """Ask each wish in turn, each seeing what those before it did; answers the decided and the failed.

    Of a release they see that the claim is gone, but its CPUs keep their owner until the next write: the
    API server compares with the stored owners, so a core may not be released and claimed in one.
    """
    seen = ledger
    decided: list[tuple[_Wish[Any], LedgerChange, object]] = []
    failed: list[tuple[_Wish[Any], KvplaceError]] = []
    for wish in batch:
        try:
            change, answer = wish.decide(seen)
            seen = seen.after(LedgerChange(claims=change.claims))
        except KvplaceError as error:
            failed.append((wish, error))
            continue
        decided.append((wish, change, answer))
        if change.releases:
            left = {uid: claim for uid, claim in seen.claims.items() if uid not in change.releases}
            seen = Ledger(seen.owners, left)
    return decided, failed


def _joined(changes: list[LedgerChange]) -> LedgerChange:
    claims: dict[str, Claim] = {}
    releases: dict[str, None] = {}
    for change in changes:
        for uid in change.releases:
            claims.pop(uid, None)
            releases[uid] = None
        claims |= {claim.uid: claim for claim in change.claims}
    return LedgerChange(tuple(claims.values()), tuple(releases))


def _answer(wish: _Wish[Any], answer: object) -> None:
    if not wish.answer.done():
        wish.answer.set_result(answer)


def _fail(wish: _Wish[Any], error: KvplaceError) -> None:
    if not wish.answer.done():
        wish.answer.set_exception(error)
        wish.answer.exception()  # marks it as seen, also when nobody awaits it or its asker gave up
        if not wish.awaited:
            log.warning("a later ledger write was not done: %s", error)


def _is_newer(record: LedgerRecord, known: LedgerRecord) -> bool:
    """Whether a record is newer than another one, be it of an object that has gone since.

    Resource versions are numbers that grow over all objects of a kind (KEP-5504).
    """
    if record.resource_version.isdigit() and known.resource_version.isdigit():
        return int(record.resource_version) > int(known.resource_version)
    return record.resource_version != known.resource_version
