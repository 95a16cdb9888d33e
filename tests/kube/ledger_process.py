"""The ledgers of one process on a cluster in memory, and the decisions that tests ask of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from kvplace.core.cpuset import cpus_of, lowest, mask_of
from kvplace.core.errors import Misconfigured, Refused
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.ledgers import LedgerDecision, Ledgers
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import LEDGERS
from tests.kube.example_claims import claim
from tests.kube.faulty_cluster import FaultyCluster

N = NodeName("n")
CPUS = 8
ALL = mask_of(range(CPUS))


class Recording(FaultyCluster):
    """A cluster that remembers every write it was asked for, and may find a pod's claim invalid."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Ledger, LedgerChange]] = []
        self.invalid: set[str] = set()

    async def write_ledger(self, before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        self.asked.append((before.ledger, change))
        if any(claim.uid in self.invalid for claim in change.claims):
            raise Misconfigured("the API server rejects it, HTTP 422 (spec.claims: too long)")
        return await super().write_ledger(before, change)

    def stored(self, node: str = "n") -> Ledger:
        return self._ledgers.records[node].ledger


@contextlib.asynccontextmanager
async def process(
    cluster: FaultyCluster,
    *,
    attempts: int = 8,
    gather_seconds: float = 0.0,
    quiet_seconds: float = 3600.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[Ledgers]:
    """The ledgers of one process, following the cluster."""
    store: Store[NodeName, LedgerRecord] = Store(LEDGERS)
    ledgers = Ledgers(
        cluster,
        store,
        attempts=attempts,
        gather_seconds=gather_seconds,
        quiet_seconds=quiet_seconds,
        sleep=sleep,
    )
    following = asyncio.create_task(store.run(cluster))
    await store.wait_until_synced()
    try:
        yield ledgers
    finally:
        await ledgers.stop()
        following.cancel()


async def settled(condition: Callable[[], bool]) -> None:
    """Let everybody work until the condition holds."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def delivered(cluster: FaultyCluster, ledgers: Ledgers) -> None:
    """Wait until the watch has brought everything so far: what is written to another node after it."""
    cluster.put_ledger("last", Ledger())
    await settled(lambda: ledgers.current(NodeName("last")) is not None)


def taking(uid: str, count: int = 1) -> LedgerDecision[int]:
    """Claim the lowest free CPUs for a pod, as a bind does: what it has already is its answer."""

    def decide(ledger: Ledger) -> tuple[LedgerChange, int]:
        if uid in ledger.claims:
            return LedgerChange(), ledger.claims[PodUid(uid)].owned
        free = ALL & ~ledger.owned
        if free.bit_count() < count:
            raise Refused(f"no CPUs for {uid}")
        made = claim(uid, *cpus_of(lowest(free, count)))
        return LedgerChange((made,)), made.owned

    return decide


def releasing(uid: str) -> LedgerDecision[bool]:
    """Release a pod; returns whether it had a claim."""
    return lambda ledger: (
        LedgerChange(releases=tuple(map(PodUid, (uid,) if uid in ledger.claims else ()))),
        uid in ledger.claims,
    )
