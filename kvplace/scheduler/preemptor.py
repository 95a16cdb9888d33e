"""The verb preempt: whom kube-scheduler evicts so that a VM of higher priority gets cores that fit its scope.

kube-scheduler asks after it has found, on up to some hundred nodes, pods of lower priority; their eviction
gives the VM enough CPUs in number. Which cores they have it does not know. The answer names one node, and on
it the victims of least cost in kube-scheduler's own order that make the VM fit. Both may differ
from the pods and nodes that were sent: where Filter has just found only cores missing.

No pod is evicted in vain: where a VM fits once pods have ended that end anyway, it waits for them,
for a limited time. What the victims leave is reserved for it in the node's
ledger (`core/claim_changes.py`) before they are named, so no replica gives it to any other pod. Only a pod
of higher priority may take it.

`victim_questions` asks about the victims on one node, and `core/cluster` answers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Protocol

from kvplace.core.allocator.allocate import try_place
from kvplace.core.claim_changes import LONGEST_S, kept_for, reserve
from kvplace.core.cluster.victim_search import VictimSearch
from kvplace.core.cluster.victims import (
    DisruptionBudget,
    Question,
    Victims,
)
from kvplace.core.errors import Unavailable
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement
from kvplace.core.request import OnFailure, Request
from kvplace.core.scalars import NO_CPUS, NodeName, PodUid
from kvplace.kube.concurrency import Turns
from kvplace.kube.ledgers import no_change
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable
from kvplace.scheduler.claim_placements import rfc3339
from kvplace.scheduler.extender_protocol import PreemptionArgs, PreemptionResult, SentVictims
from kvplace.scheduler.metrics import PREEMPTIONS
from kvplace.scheduler.pending_pods import PendingPods
from kvplace.scheduler.victim_questions import NodeWithVictims, questions_about

log = logging.getLogger(__name__)

MOST_NODES = 500
"""Nodes that one call checks: first the nodes in kube-scheduler's call."""
MOST_SECONDS = 4.0
"""How long one call searches; kube-scheduler schedules nothing meanwhile, and gives up after httpTimeout."""
MOST_EQUALS = 16
"""Nodes with equally cheap victims among which the one with the best placement is chosen."""
PATIENCE_SECONDS = 120.0
"""How long a pod waits for another one that ends anyway, before others are evicted for it."""
_REFUSED_SECONDS = 2.0
"""How old a refusal may be: kube-scheduler asks Filter and preempt in one attempt."""
_QUESTION_STEPS, _LEAVING_STEPS = 2_000, 50
"""Steps of asking about the victims on one node, and of listing the pods that leave it."""
_SEARCHES = 3
"""How often victims are searched for in one call: a node may change before its cores are reserved."""


class BudgetReader(Protocol):
    """The cluster calls of preemption."""

    async def read_disruption_budgets(self) -> tuple[DisruptionBudget, ...]:
        """Read all PodDisruptionBudgets."""
        ...


@dataclass(frozen=True, slots=True)
class _Offer:
    """The victims of the best node so far."""

    node: NodeName
    victims: Victims

    @property
    def rank(self) -> tuple[object, ...]:
        return (self.victims.cost, self.victims.quality, self.node)


class Preemptor:
    """Answers preempt, and reserves the cores for the pod that they are released for."""

    def __init__(
        self,
        cluster: BudgetReader,
        cache: NodeCache,
        pending: PendingPods,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` dates reservations, `clock` times how long others are waited for."""
        self._cluster = cluster
        self._cache = cache
        self._pending = pending
        self._now = now
        self._clock = clock
        self._priorities: Counter[int] = Counter()
        """How many bound pods have each priority."""
        cache.pods.subscribe(self._pod_seen)

    # Calls of Filter.

    def may_help(self, pod: PodRecord) -> bool:
        """Return whether any pod could be evicted for a pod at all."""
        return any(priority < pod.priority for priority in self._priorities)

    def refused(self, pod: PodRecord, nodes: Collection[NodeName]) -> None:
        """Remember where only cores are missing: kube-scheduler has found everything else there."""
        pending = self._pending.get(pod.uid)
        pending.curable = tuple(islice(nodes, MOST_NODES))
        pending.curable_at = self._clock()

    async def outranks(self, pod: PodRecord, nodes: Collection[NodeName], request: Request) -> bool:
        """Reserve for a pod what is reserved for pods of lower priority, where it fits on that."""
        if self._cache.ledgers.nodes_claimed_by(pod.uid):
            return False
        for node in sorted(self._cache.ledgers.nodes_with_reservations.intersection(nodes)):
            machine = self._cache.machine(node)
            ledger = self._cache.ledger(node)
            lower = self._outranked(ledger, pod)
            if isinstance(machine, Unusable) or not lower:
                continue
            left, holds = _without(ledger, lower), self._pending.held_on(node, but=pod.uid)
            free = machine.free(left, holds, self._cache.free_devices(machine, left, holds))
            placement = try_place(machine.topology, free, request)
            if placement is not None and await self._reserve(pod, node, placement, ()):
                await self._cache.ledgers.change(node, no_change, at_once=True)  # its own by this write
                return True
        return False

    def _outranked(self, ledger: Ledger, pod: PodRecord) -> frozenset[PodUid]:
        """Return the pods with a reservation and a lower priority than a pod."""
        reserved = (uid for uid, claim in ledger.claims.items() if claim.reserved is not None)
        known = ((uid, self._cache.pods.get(uid)) for uid in reserved if uid != pod.uid)
        return frozenset(uid for uid, other in known if other is not None and other.priority < pod.priority)

    async def _reserve(
        self, pod: PodRecord, node: NodeName, placement: Placement, gone: Collection[PodUid]
    ) -> bool:
        """Reserve a placement for a pod that gets it when others are gone; False if the node has changed.

        What was reserved for pods of lower priority is not any more, if it is in the way.
        """
        now = self._now()
        whole = claim_of(
            pod.uid, placement, namespace=pod.namespace, pod=pod.name, vmi=pod.vmi, since=rfc3339(now)
        )
        until = rfc3339(now + timedelta(seconds=LONGEST_S))

        def decide(ledger: Ledger) -> tuple[LedgerChange, bool]:
            known = ledger.claims.get(pod.uid)
            if known is not None:
                return LedgerChange(), known.reserved is not None and known.since == whole.since
            machine = self._cache.machine(node)
            if isinstance(machine, Unusable):
                return LedgerChange(), False
            for lower in (frozenset[PodUid](), self._outranked(ledger, pod)):
                left = _without(ledger, lower.union(gone))
                free = machine.free(left, self._pending.held_on(node, but=pod.uid))
                if free.can_give(whole):
                    reserved = reserve(ledger, kept_for(whole, ledger, free), but=NO_CPUS, until=until)
                    return LedgerChange(claims=(reserved,), releases=tuple(sorted(lower))), True
            return LedgerChange(), False

        return await self._cache.ledgers.change(node, decide, at_once=True)

    # The verb.

    async def preempt(self, args: PreemptionArgs) -> PreemptionResult:
        """Answer with the victims for a pod by node; an empty answer lets it wait."""
        if not self._cache.has_synced:
            raise Unavailable("kvplace has not read the cluster yet; it will in a moment")
        asking = self._pending.request_of(args.pod)
        if asking is None or asking.pod_request.request.options.on_failure is OnFailure.FLOAT:
            PREEMPTIONS.labels("unchanged").inc()
            return PreemptionResult.unchanged(args)
        if args.never:
            PREEMPTIONS.labels("none").inc()
            return PreemptionResult()
        ends = self._clock() + MOST_SECONDS
        candidates = self._candidates(args)
        for _ in range(_SEARCHES):
            offer = await self._best_offer(args, candidates, asking.pod_request.request, ends)
            if offer is None:
                break
            if not offer.victims.tenants:
                await self._wait(args.pod.uid, candidates)
                PREEMPTIONS.labels("waiting").inc()
                return PreemptionResult()
            gone = {one.uid for one in offer.victims.tenants} | self._leaving(offer.node)
            if await self._reserve(args.pod, offer.node, offer.victims.placement, gone):
                return self._evict(args, offer)
            if self._clock() > ends:
                break
        PREEMPTIONS.labels("none").inc()
        return PreemptionResult()

    def _evict(self, args: PreemptionArgs, offer: _Offer) -> PreemptionResult:
        node, victims = offer.node, offer.victims
        uids = [one.uid for one in victims.tenants]
        sent = args.victims.get(node)
        violations = sent.violations if sent and set(sent.uids) == set(uids) else victims.violations
        PREEMPTIONS.labels("victims").inc()
        log.info(
            "preempts %d pods, violating %d disruption budgets",
            len(uids),
            violations,
            extra={**args.about, "node": node, "victims": uids},
        )
        return PreemptionResult.evicting(node, uids, violations)

    async def _best_offer(
        self,
        args: PreemptionArgs,
        candidates: Mapping[NodeName, SentVictims],
        request: Request,
        ends: float,
    ) -> _Offer | None:
        """Search the nodes, those first that may be cheapest, until no other can be better or time ends."""
        budgets = await self._cluster.read_disruption_budgets()
        ranked = []
        turns = Turns()
        for node, sent in candidates.items():
            await turns.spend(_QUESTION_STEPS)
            questions = self._questions(node, args, sent, request, budgets)
            least = [VictimSearch(question).least_cost for question in questions]
            if least:
                ranked.append((min(least), node))
        ranked.sort()
        best: _Offer | None = None
        equals = 0
        for cost, node in ranked:
            if best is not None:
                equals += cost == best.victims.cost
                if cost > best.victims.cost or not best.victims.tenants or equals > MOST_EQUALS:
                    break
            # Asked anew: a node may have changed meanwhile, and many searches at once would take memory.
            for question in self._questions(node, args, candidates[node], request, budgets):
                found = await turns.finish(VictimSearch(question).best())
                offer = _Offer(node, found) if found is not None else None
                if offer is not None and (best is None or offer.rank < best.rank):
                    best = offer
            if self._clock() > ends:
                break
        return best

    def _candidates(self, args: PreemptionArgs) -> dict[NodeName, SentVictims]:
        """The nodes that kube-scheduler has sent, and those where it has found only cores missing."""
        pending = self._pending.get(args.pod.uid)
        curable, pending.curable = pending.curable, ()
        nodes = dict(args.victims)
        for node in curable if self._clock() - pending.curable_at <= _REFUSED_SECONDS else ():
            nodes.setdefault(node, SentVictims((), 0))
        return dict(islice(nodes.items(), MOST_NODES))

    def _questions(
        self,
        node: NodeName,
        args: PreemptionArgs,
        sent: SentVictims,
        request: Request,
        budgets: Sequence[DisruptionBudget],
    ) -> Iterator[Question]:
        """Ask about the victims on a node as it is now."""
        machine = self._cache.usable_machine(node)
        if isinstance(machine, Unusable):
            return
        uid, ledger = args.pod.uid, self._cache.ledger(node)
        ledger = _without(ledger, self._outranked(ledger, args.pod))
        known = ((one, self._cache.pods.get(one)) for one in (*ledger.claims, *sent.uids))
        leaving = self._leaving(node)
        staying = self._awaited_in_vain(uid, leaving)
        there = NodeWithVictims(
            node,
            self._cache.occupied(machine, ledger, self._pending.held_on(node, but=uid)),
            {one: pod for one, pod in known if pod is not None},
            leaving - staying,
            staying,
        )
        yield from questions_about(there, args, sent, request, budgets)

    def _leaving(self, node: NodeName) -> frozenset[PodUid]:
        """Return the pods with claims on a node that are released anyway.

        What is reserved for a pod does not: the cache may have it before its pod.
        """
        claims = self._cache.ledger(node).claims
        return frozenset(
            uid for uid, claim in claims.items() if claim.reserved is None and self._cache.is_leaving(uid)
        )

    async def _wait(self, uid: PodUid, nodes: Iterable[NodeName]) -> None:
        """Note that a pod waits for VMs that end anyway on any of the nodes: from now on, or still."""
        leaving: set[PodUid] = set()
        turns = Turns()
        for node in nodes:
            await turns.spend(_LEAVING_STEPS)
            leaving |= self._leaving(node)
        pending, has_claim = self._pending.get(uid), self._cache.ledgers.nodes_claimed_by
        still = {other: since for other, since in pending.leaving.items() if has_claim(other)}
        pending.leaving = dict.fromkeys(leaving, self._clock()) | still

    def _awaited_in_vain(self, uid: PodUid, leaving: frozenset[PodUid]) -> frozenset[PodUid]:
        """Return the pods that another one has waited for so long that they count as staying."""
        waiting, oldest = self._pending.get(uid).leaving, self._clock() - PATIENCE_SECONDS
        return frozenset(other for other in leaving if waiting.get(other, oldest) < oldest)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        if before is not None and before.node:
            self._priorities[before.priority] -= 1
            if not self._priorities[before.priority]:
                del self._priorities[before.priority]
        if after is not None and after.node:
            self._priorities[after.priority] += 1


def _without(ledger: Ledger, gone: Collection[PodUid]) -> Ledger:
    return ledger.after(LedgerChange(releases=tuple(gone))) if gone else ledger
