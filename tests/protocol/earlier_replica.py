"""A replica of an earlier version beside a new one, as in an upgrade: it knows no reservations in ledgers.

It reads claims without `reserved`, and its writes, which are merge patches, leave that field as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TypeVar

from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.scalars import NodeName
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.watches import Apply, InitApply, WatchEvent
from tests.controller.replicas import Replica
from tests.protocol.network import View

K = TypeVar("K")
R = TypeVar("R")


class OlderView(View):
    """The cluster as such a replica sees it."""

    async def read_ledger(self, node: NodeName) -> LedgerRecord | None:
        record = await super().read_ledger(node)
        return record and _as_read(record)

    async def create_ledger(self, node: NodeName) -> LedgerRecord:
        return _as_read(await super().create_ledger(node))

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        stored = self._ledgers.get(before.node)
        if stored is not None and stored.resource_version == before.resource_version:
            before = stored
        known = before.ledger.claims
        claims = [
            replace(claim, reserved=known[claim.uid].reserved) if claim.uid in known else claim
            for claim in change.claims
        ]
        return _as_read(await super().write_ledger(before, LedgerChange(tuple(claims), change.releases)))

    async def _late(self, events: AsyncIterator[WatchEvent[R]], kind: str) -> AsyncIterator[WatchEvent[R]]:
        async for event in super()._late(events, kind):
            match event:
                case InitApply(LedgerRecord() as record) | Apply(LedgerRecord() as record):
                    yield replace(event, record=_as_read(record))  # type: ignore[arg-type]
                case _:
                    yield event


def forget_reservations(one: Replica) -> None:
    """Let a replica name victims as earlier versions do, which reserve nothing in ledgers."""

    async def reserve(*_args: object) -> bool:
        return True

    setattr(one.extender._preemptor, "_reserve", reserve)  # noqa: B010


def _as_read(record: LedgerRecord) -> LedgerRecord:
    claims = {uid: replace(claim, reserved=None) for uid, claim in record.ledger.claims.items()}
    return replace(record, ledger=Ledger(record.ledger.owners, claims))
