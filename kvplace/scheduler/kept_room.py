"""One reservation in a ledger, as the attempt that has made it renews it and gives it back.

While room is made, its replica renews the reservation. A reservation that is not renewed ends by itself.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from kvplace.core.claim_changes import RESERVED_S
from kvplace.core.errors import Conflict, KvplaceError, Unavailable
from kvplace.core.ledger import Claim, Ledger, LedgerChange
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.ledgers import Ledgers

log = logging.getLogger(__name__)


class RoomStopped(Exception):
    """No room is made for a VM any more; the message is the reason in one clause."""


RENEW_S = 10.0
"""A reservation is renewed so often, to stay for as long as room is being made."""


def until_when(now: datetime) -> str:
    """Return when a reservation that is written now ends, for people."""
    ends = now + timedelta(seconds=RESERVED_S)
    return ends.isoformat(timespec="seconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class KeptRoom:
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
