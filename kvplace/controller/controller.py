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
from kvplace.controller.upkeep import (
    Lost,
    Verdict,
    has_ended,
    judge,
    judge_live,
    lost_claim,
    may_be_bound_yet,
)
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import Conflict, KvplaceError, Refused, Unavailable
from kvplace.core.ledger import Claim, Ledger, LedgerChange, OwnershipConflict, confirmed
from kvplace.core.marks import RELEASED_AT
from kvplace.kube.cluster import Cluster
from kvplace.kube.events import EventRecorder, cores_overlap, pod_reference
from kvplace.kube.records import NodeRecord, PodRecord, TopologyRecord
from kvplace.nodes.node_cache import NodeCache

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
    """Watches pods, nodes and ledgers through the node cache and mends what differs."""

    def __init__(
        self,
        cluster: Cluster,
        cache: NodeCache,
        events: EventRecorder,
        settings: ControllerSettings | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster = cluster
        self._pods = cache.pods
        self._nodes = cache.nodes
        self._ledgers = cache.ledgers
        self._events = events
        self._settings = settings or ControllerSettings()
        self._now = now
        self._replica = self._settings.replica or socket.gethostname()
        self._bound_to: dict[str, set[str]] = {}
        self._vanished: set[str] = set()
        self._overlaps: dict[str, str] = {}
        self._due: dict[str, float] = {}
        self._due_changed = asyncio.Event()
        self._freed: set[str] = set()
        self._freed_changed = asyncio.Event()
        cache.pods.subscribe(self._pod_seen)
        cache.nodes.subscribe(self._node_seen)
        cache.topologies.subscribe(self._topology_seen)
        self._freed.clear()  # what was known before is no news
        self._freed_changed.clear()

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
        unchanged: Claim | None = None
        if verdict is Verdict.LOOK:
            pod = await self._cluster.read_pod(claim.namespace, claim.pod)
            verdict = judge_live(claim, node, pod, now=self._now(), patience_s=self._settings.patience_s)
            if verdict is Verdict.RELEASE and may_be_bound_yet(claim, pod):
                unchanged = claim
                log.warning(
                    "claim of a pod that was never bound is given back",
                    extra={"node": node, "uid": claim.uid},
                )
        match verdict:
            case Verdict.RELEASE:
                await self._release(node, claim, unchanged)
            case Verdict.CONFIRM:
                await self._confirm(node, claim)
            case Verdict.KEEP | Verdict.LOOK:
                pass

    async def _confirm(self, node: str, claim: Claim) -> None:
        """Note that a pod was seen bound with its claim; what it runs on counts, should the two differ."""
        pod = self._pods.get(claim.uid)
        lost = lost_claim(pod) if pod is not None else None
        if lost is not None and (lost.claim.cpus, lost.claim.owned) != (claim.cpus, claim.owned):
            await self._claim_back(lost)
        else:
            self._ledgers.change_later(node, lambda ledger: (_confirmation(ledger, claim.uid), None))

    async def _release(self, node: str, claim: Claim, unchanged: Claim | None = None) -> None:
        """Give a claim back; if `unchanged` is given, only while it still stands so in the ledger.

        A bind that takes an old claim over dates it anew; so of bind and controller the first one wins.
        """
        uid = claim.uid
        released = False

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            nonlocal released
            stored = ledger.claims.get(uid)
            if stored is None or (unchanged is not None and stored != unchanged):
                return LedgerChange(), None
            released = True
            return LedgerChange(releases=(uid,)), None

        await self._ledgers.change(node, decide)
        if not self._ledgers.nodes_claimed_by(uid):
            self._vanished.discard(uid)
        if released:
            RELEASES.inc()
            log.info(
                "released CPUs %s",
                format_cpu_list(claim.cpus),
                extra={"node": node, "uid": uid, "vm": claim.vmi},
            )
            self._may_fit_now(node)

    def _lost_on(self, node: str, known: Mapping[str, Claim]) -> list[Lost]:
        running = (self._pods.get(uid) for uid in self._bound_to.get(node, ()) if uid not in known)
        found = (lost_claim(pod) for pod in running if pod is not None)
        return [lost for lost in found if lost is not None]

    async def _claim_back(self, lost: Lost) -> None:
        """Claim again for a pod that runs; when its cores have another owner, say so and change nothing."""
        live = await self._cluster.read_pod(lost.claim.namespace, lost.claim.pod)
        found = lost_claim(live) if live is not None and live.uid == lost.claim.uid else None
        if found is None:
            return  # it has ended, and our cache has not heard
        claim = found.claim

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            stored = ledger.claims.get(claim.uid)
            if stored is not None and (stored.cpus, stored.owned) == (claim.cpus, claim.owned):
                return LedgerChange(), None
            others = {
                cpu: owner
                for cpu, owner in ledger.owners.items()
                if claim.owned >> cpu & 1 and owner != claim.uid
            }
            if others:
                raise OwnershipConflict(
                    f"pod {claim.namespace}/{claim.pod} runs on CPUs {format_cpu_list(mask_of(others))} of "
                    f"{lost.node}, which the ledger gives to {', '.join(sorted(set(others.values())))}"
                )
            return LedgerChange(claims=(claim,)), None

        try:
            await self._ledgers.change(lost.node, decide)
        except OwnershipConflict as error:
            self._report_overlap(lost.node, claim, str(error))
        else:
            self._overlaps.pop(claim.uid, None)

    def _report_overlap(self, node: str, claim: Claim, conflict: str) -> None:
        """Report that two pods run on one core; count and log it only when something about it has changed."""
        self._events.record(cores_overlap(pod_reference(claim.namespace, claim.pod, claim.uid), conflict))
        if self._overlaps.get(claim.uid) != conflict:
            self._overlaps[claim.uid] = conflict
            OVERLAPS.inc()
            log.error("%s", conflict, extra={"node": node, "uid": claim.uid})

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
            if after is None:
                self._overlaps.pop(before.uid, None)
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

    def _topology_seen(self, before: TopologyRecord | None, after: TopologyRecord | None) -> None:
        if after is not None and (before is None or not after.allows_what(before)):
            self._may_fit_now(after.node)

    def _may_fit_now(self, node: str) -> None:
        self._freed.add(node)
        self._freed_changed.set()

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
            self._vanished = {uid for uid in self._vanished if self._ledgers.nodes_claimed_by(uid)}
            for record in self._ledgers.all():
                self._mark(record.node)
            for node in self._bound_to.keys() - {""}:
                self._mark(node)
            await asyncio.sleep(self._settings.round_s)

    async def _wake(self) -> None:
        """Make kube-scheduler try waiting pods again after a release, or when a machine was described anew.

        It does so when a node changes; left alone it would take five minutes.
        """
        while True:
            await self._freed_changed.wait()
            self._freed_changed.clear()
            pause = self._settings.wake_pause_s
            freed, self._freed = self._freed, set()
            there = sorted(freed & self._nodes.records.keys())
            if there and self._bound_to.get(""):
                try:
                    await self._cluster.annotate_node(there[0], {RELEASED_AT: self._now().isoformat()})
                    WAKES.inc()
                except (Conflict, Refused, Unavailable) as error:
                    log.info("waiting pods are woken a little later: %s", error, extra={"node": there[0]})
                    self._freed |= freed - {there[0]} if isinstance(error, Refused) else freed
                    self._freed_changed.set()
                    pause = max(pause, _WAKE_AGAIN_S)
                except KvplaceError as error:
                    log.warning("waiting pods were not woken: %s", error, extra={"node": there[0]})
            await asyncio.sleep(pause)


_WAKE_AGAIN_S = 0.5
"""Pause before waking is tried again that failed."""


def _confirmation(ledger: Ledger, uid: str) -> LedgerChange:
    claim = ledger.claims.get(uid)
    if claim is None or confirmed(claim) == claim:
        return LedgerChange()
    return LedgerChange(claims=(confirmed(claim),))
