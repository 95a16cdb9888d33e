"""Changes that gather for the next write of a node's ledger, and how they are decided together. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvplace.core.errors import KvplaceError, Refused
from kvplace.core.ledger import Claim, Ledger, LedgerChange
from kvplace.core.reservation import grown
from kvplace.core.scalars import PodUid

T = TypeVar("T")

Decision = Callable[[Ledger], tuple[LedgerChange, T]]
"""A pure question to the ledger as it will be: what to change, and what to answer the caller.

It may be asked several times; it must search for its own earlier effect first (by pod UID). Raising a
KvplaceError leaves the ledger alone and reaches the caller.
"""


@dataclass(frozen=True, eq=False)
class PendingChange(Generic[T]):
    """A decision that is still to be stored."""

    decide: Decision[T]
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
    """Decide nothing; what is reserved and has been released is written all the same."""
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
