"""The loop that keeps ledgers true: releases, confirmations, lost claims, ledgers of vanished nodes.

Events only mark a node as due; the work looks at the whole node. So a missed or doubled event costs time,
never truth, and a round over all nodes runs now and then besides.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from zlib import crc32

from kvplace.controller.metrics import OVERLAPS, RELEASES, WAKES
from kvplace.controller.upkeep import Lost, Verdict, has_ended, judge, judge_live, lost_claim
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import Conflict, KvplaceError
from kvplace.core.ledger import Claim, Ledger, LedgerChange, OwnershipConflict, confirmed
from kvplace.core.marks import RELEASED_AT
from kvplace.kube.cluster import Cluster
from kvplace.kube.ledgers import Ledgers
from kvplace.kube.records import EventRecord, EventType, NodeRecord, PodRecord
from kvplace.kube.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """How often and how patiently the controller works."""

    patience_s: float = 60.0
    """How long a claim may wait for its binding before its pod is read live; far above a bind's limit."""
    round_s: float = 30.0
    """Time between two looks at every node."""
    wake_pause_s: float = 0.25
    """Least time between two wake-ups, so that many releases at once wake once."""
    confirm_s: float = 2.0
    """How much later a claim is confirmed whose pod has been bound as claimed; nobody waits for that."""
    spread_s: float = 0.2
    """Replicas begin a node's work up to so much apart, each in its own order; the later find it done."""
    replica: str = ""
    """Tells this replica from the others; empty: the host's name."""


class Controller:
    """Watches pods, nodes and ledgers through the given caches and mends what differs."""

    def __init__(
        self,
        cluster: Cluster,
        pods: Store[str, PodRecord],
        nodes: Store[str, NodeRecord],
        ledgers: Ledgers,
        settings: ControllerSettings | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster = cluster
        self._pods = pods
        self._nodes = nodes
        self._ledgers = ledgers
        self._settings = settings or ControllerSettings()
        self._now = now
        self._replica = self._settings.replica or socket.gethostname()
        self._bound_to: dict[str, set[str]] = {}
        self._vanished: set[str] = set()
        self._due: dict[str, float] = {}
        self._due_changed = asyncio.Event()
        self._freed: str = ""
        self._freed_changed = asyncio.Event()
        pods.subscribe(self._pod_seen)
        nodes.subscribe(self._node_seen)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work())
            group.create_task(self._rounds())
            group.create_task(self._wake())

    async def mend(self, node: str) -> None:
        """Bring one node's ledger in step with its pods; raises what a write raises."""
        record = self._ledgers.current(node)
        claims: Mapping[str, Claim] = record.ledger.claims if record is not None else {}
        # All at once: so the releases of a node gather in few writes.
        await asyncio.gather(
            *(self._mend_claim(node, claim) for claim in claims.values()),
            *(self._claim_back(lost) for lost in self._lost_on(node, claims)),
        )
        await self._drop_ledger_of_vanished_node(node)

    # One thing each.

    async def _mend_claim(self, node: str, claim: Claim) -> None:
        verdict = judge(
            claim,
            node,
            self._pods.get(claim.uid),
            vanished=claim.uid in self._vanished,
            now=self._now(),
            patience_s=self._settings.patience_s,
        )
        if verdict is Verdict.LOOK:
            pod = await self._cluster.read_pod(claim.namespace, claim.pod)
            verdict = judge_live(claim, node, pod)
            if verdict is Verdict.RELEASE and pod is not None and pod.uid == claim.uid and not pod.node:
                log.warning(
                    "claim of a pod that was never bound is given back",
                    extra={"node": node, "uid": claim.uid},
                )
        match verdict:
            case Verdict.RELEASE:
                await self._release(node, claim)
            case Verdict.CONFIRM:
                self._ledgers.change_later(node, lambda ledger: (_confirmation(ledger, claim.uid), None))
            case Verdict.KEEP | Verdict.LOOK:
                pass

    async def _release(self, node: str, claim: Claim) -> None:
        uid = claim.uid
        released = await self._ledgers.change(
            node,
            lambda ledger: (
                LedgerChange(releases=(uid,) if uid in ledger.claims else ()),
                uid in ledger.claims,
            ),
        )
        if not self._ledgers.nodes_claimed_by(uid):
            self._vanished.discard(uid)
        if released:
            RELEASES.inc()
            log.info(
                "released CPUs %s",
                format_cpu_list(claim.cpus),
                extra={"node": node, "uid": uid, "vm": claim.vmi},
            )
            self._freed = node
            self._freed_changed.set()

    def _lost_on(self, node: str, known: Mapping[str, Claim]) -> list[Lost]:
        running = (self._pods.get(uid) for uid in self._bound_to.get(node, ()) if uid not in known)
        found = (lost_claim(pod) for pod in running if pod is not None)
        return [lost for lost in found if lost is not None]

    async def _claim_back(self, lost: Lost) -> None:
        """Claim again for a pod that runs; when its cores have another owner, say so and change nothing."""
        claim = lost.claim

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            if claim.uid in ledger.claims:
                return LedgerChange(), None
            taken = mask_of(cpu for cpu, owner in ledger.owners.items() if claim.owned >> cpu & 1)
            if taken:
                owners = sorted({ledger.owners[cpu] for cpu in ledger.owners if claim.owned >> cpu & 1})
                raise OwnershipConflict(
                    f"pod {claim.namespace}/{claim.pod} runs on CPUs {format_cpu_list(taken)} of {lost.node},"
                    f" which the ledger gives to {', '.join(owners)}"
                )
            return LedgerChange(claims=(claim,)), None

        try:
            await self._ledgers.change(lost.node, decide)
        except OwnershipConflict as error:
            OVERLAPS.inc()
            log.error("%s", error, extra={"node": lost.node, "uid": claim.uid})
            await self._cluster.record_event(
                EventRecord(
                    claim.namespace,
                    "Pod",
                    claim.pod,
                    claim.uid,
                    EventType.WARNING,
                    "CoresOverlap",
                    "Reclaiming",
                    str(error),
                )
            )

    async def _drop_ledger_of_vanished_node(self, node: str) -> None:
        record = self._ledgers.current(node)
        if record is None or node in self._nodes.records or record.ledger.claims or record.ledger.owners:
            return
        try:
            await self._cluster.delete_ledger(record)
        except Conflict:
            self._mark(node, self._settings.round_s)

    # When.

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        if before is not None:
            self._bound_to.get(before.node, set()).discard(before.uid)
            if after is None and self._ledgers.nodes_claimed_by(before.uid):
                self._vanished.add(before.uid)
        if after is not None:
            self._bound_to.setdefault(after.node, set()).add(after.uid)
        for pod in (before, after):
            if pod is not None:
                claimed_on = self._ledgers.nodes_claimed_by(pod.uid)
                is_in_order = after is not None and not has_ended(after) and claimed_on == {after.node}
                for node in {pod.node, *claimed_on} - {""}:
                    self._mark(node, self._settings.confirm_s if is_in_order else 0.0)

    def _node_seen(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        if after is None and before is not None:
            self._mark(before.name)

    def _mark(self, node: str, after_s: float = 0.0) -> None:
        """Make a node due, at a moment of this replica's own, so that replicas seldom do the same work.

        By the hash of node and replica: no replica needs to know how many others there are.
        """
        turn = crc32(f"{node} {self._replica}".encode()) / 0xFFFFFFFF
        when = asyncio.get_running_loop().time() + after_s + turn * self._settings.spread_s
        self._due[node] = min(when, self._due.get(node, when))
        self._due_changed.set()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._due_changed.clear()
            ready = [node for node, when in self._due.items() if when <= loop.time()]
            for node in ready:
                del self._due[node]
            if ready:
                await asyncio.gather(*(self._mend_or_try_later(node) for node in ready))
                continue
            wait = min(self._due.values(), default=None)
            try:
                async with asyncio.timeout_at(wait):
                    await self._due_changed.wait()
            except TimeoutError:
                continue

    async def _mend_or_try_later(self, node: str) -> None:
        try:
            await self.mend(node)
        except KvplaceError as error:
            log.warning("node %s is mended later: %s", node, error, extra={"node": node})
            self._mark(node, 1.0)

    async def _rounds(self) -> None:
        while True:
            for record in self._ledgers.all():
                self._mark(record.node)
            for node in self._bound_to.keys() - {""}:
                self._mark(node)
            await asyncio.sleep(self._settings.round_s)

    async def _wake(self) -> None:
        """Make kube-scheduler try waiting pods again after a release: it does so when a node changes."""
        while True:
            await self._freed_changed.wait()
            self._freed_changed.clear()
            node = self._freed
            if node in self._nodes.records and self._bound_to.get(""):
                try:
                    await self._cluster.annotate_node(node, {RELEASED_AT: self._now().isoformat()})
                    WAKES.inc()
                except KvplaceError as error:
                    log.warning("waiting pods were not woken: %s", error, extra={"node": node})
            await asyncio.sleep(self._settings.wake_pause_s)


def _confirmation(ledger: Ledger, uid: str) -> LedgerChange:
    claim = ledger.claims.get(uid)
    if claim is None or confirmed(claim) == claim:
        return LedgerChange()
    return LedgerChange(claims=(confirmed(claim),))
