"""The verb preempt: the victims that kube-scheduler evicts so that a VM of higher priority gets cores.

kube-scheduler asks after it has found, on up to some hundred nodes, pods of lower priority; their eviction
gives the VM enough CPUs in number. It does not know their cores. The answer names one node, and on it the
victims of least cost in kube-scheduler's own order that make the VM fit. This node may be another one, if
Filter has just found only cores missing there.

No pod is evicted in vain: if a VM fits after the end of pods that end anyway, it waits for them, for a
limited time. The cores of the victims are reserved for it in the node's ledger (`core/claim_changes.py`)
before the answer names the victims. So no replica gives these cores to another pod. Only a pod of higher
priority may take them.

`victim_questions.py` turns the call into questions for `core/cluster/victim_search.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from kvplace.core.allocator.allocate import try_place
from kvplace.core.claim_changes import LONGEST_S
from kvplace.core.cluster.victim_search import VictimSearch
from kvplace.core.cluster.victims import (
    DisruptionBudget,
    Question,
    Victims,
)
from kvplace.core.errors import Unavailable
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.placement import Placement
from kvplace.core.request import OnFailure, Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.concurrency import Turns
from kvplace.kube.ledgers import no_change
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_machine import NodeMachine, Unusable
from kvplace.scheduler import limits
from kvplace.scheduler.extender_protocol import NodeVictims, PreemptionArgs
from kvplace.scheduler.metrics import PREEMPTIONS
from kvplace.scheduler.pending_pods import PendingPod
from kvplace.scheduler.reservations import (
    OwnReservation,
    RoomContext,
    future_claim,
    reserve_what_leaves,
    until_when,
    without,
)
from kvplace.scheduler.stored_claims import rfc3339
from kvplace.scheduler.victim_questions import NodeWithVictims, questions_about

log = logging.getLogger(__name__)

_QUESTION_STEPS, _SEARCH_STEPS, _LEAVING_STEPS = 2_000, 2_000, 50
"""Steps of asking about the victims on one node, of a placement without some of them (milliseconds on a
large machine), and of listing the pods that leave it."""


class Preemptor:
    """Answers preempt, and reserves the cores that victims release for the waiting pod."""

    def __init__(self, context: RoomContext) -> None:
        self._cluster = context.cluster
        self._cache = context.cache
        self._pending = context.pending
        self._now = context.now
        self._clock = context.clock

    # Calls of Filter.

    def refused(self, pending: PendingPod, nodes: Collection[NodeName]) -> None:
        """Remember the nodes where only cores are missing: kube-scheduler has found everything else there."""
        pending.curable = tuple(islice(nodes, limits.VICTIM_NODES))
        pending.curable_at = self._clock()

    async def outranks(self, pod: PodRecord, nodes: Collection[NodeName], request: Request) -> bool:
        """Reserve for a pod the cores that are reserved for pods of lower priority, if it fits there."""
        if self._cache.ledgers.nodes_claimed_by(pod.uid):
            return False
        for node in sorted(self._cache.ledgers.nodes_with_reservations.intersection(nodes)):
            machine = self._cache.machine(node)
            ledger = self._cache.ledger(node)
            lower = self._outranked(ledger, pod)
            if isinstance(machine, Unusable) or not lower:
                continue
            left, holds = without(ledger, lower), self._pending.held_on(node, but=pod.uid)
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

        Reservations of pods with lower priority end, if they are in the way.
        """
        now = self._now()
        own = OwnReservation(node, pod.uid, rfc3339(now))
        whole, until = future_claim(pod, placement, own.since), until_when(now, LONGEST_S)

        def change(ledger: Ledger, machine: NodeMachine) -> LedgerChange | None:
            held = self._pending.held_on(node, but=pod.uid)
            for lower in (frozenset[PodUid](), self._outranked(ledger, pod)):
                reserved = reserve_what_leaves(ledger, machine, held, whole, lower.union(gone), until=until)
                if reserved is not None:
                    return LedgerChange(claims=(reserved,), releases=tuple(sorted(lower)))
            return None

        return await own.take(self._cache, change)

    # The verb.

    async def preempt(self, args: PreemptionArgs) -> Mapping[NodeName, NodeVictims]:
        """Answer with the victims for a pod by node; an empty answer lets it wait."""
        if not self._cache.has_synced:
            raise Unavailable("kvplace has not read the cluster yet; it will in a moment")
        requested = self._pending.request_of(args.pod)
        if requested is None or requested.pod_request.request.options.on_failure is OnFailure.FLOAT:
            PREEMPTIONS.labels("unchanged").inc()
            return args.victims
        if args.never:
            PREEMPTIONS.labels("none").inc()
            return {}
        ends = self._clock() + limits.VICTIM_SEARCH_S
        candidates = self._candidates(args)
        for _ in range(limits.VICTIM_SEARCHES):
            best = await self._best_victims(args, candidates, requested.pod_request.request, ends)
            if best is None:
                break
            node, victims = best
            if not victims.tenants:
                await self._wait(args.pod.uid, candidates)
                PREEMPTIONS.labels("waiting").inc()
                return {}
            gone = {one.uid for one in victims.tenants} | self._leaving(node)
            if await self._reserve(args.pod, node, victims.placement, gone):
                return self._evict(args, node, victims)
            if self._clock() > ends:
                break
        PREEMPTIONS.labels("none").inc()
        return {}

    def _evict(
        self, args: PreemptionArgs, node: NodeName, victims: Victims
    ) -> Mapping[NodeName, NodeVictims]:
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
        return {node: NodeVictims(tuple(uids), violations)}

    async def _best_victims(
        self,
        args: PreemptionArgs,
        candidates: Mapping[NodeName, NodeVictims],
        request: Request,
        ends: float,
    ) -> tuple[NodeName, Victims] | None:
        """Search the nodes, likely the cheapest first, until no other can be better or time ends."""
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
        best: tuple[NodeName, Victims] | None = None
        equals = 0
        for cost, node in ranked:
            if best is not None:
                _, victims = best
                equals += cost == victims.cost
                if cost > victims.cost or not victims.tenants or equals > limits.EQUAL_NODES:
                    break
            # Asked anew: a node may have changed meanwhile, and many searches at once would take memory.
            for question in self._questions(node, args, candidates[node], request, budgets):
                search = VictimSearch(question)
                for _ in search.run():
                    await turns.spend(_SEARCH_STEPS)
                found = search.answer
                if found is not None and (best is None or _rank(node, found) < _rank(*best)):
                    best = node, found
            if self._clock() > ends:
                break
        return best

    def _candidates(self, args: PreemptionArgs) -> dict[NodeName, NodeVictims]:
        """Return the nodes of kube-scheduler, and the nodes where Filter found only cores missing."""
        pending = self._pending.record(args.pod.uid)
        curable, pending.curable = pending.curable, ()
        nodes = dict(args.victims)
        for node in curable if self._clock() - pending.curable_at <= limits.REFUSED_S else ():
            nodes.setdefault(node, NodeVictims((), 0))
        return dict(islice(nodes.items(), limits.VICTIM_NODES))

    def _questions(
        self,
        node: NodeName,
        args: PreemptionArgs,
        sent: NodeVictims,
        request: Request,
        budgets: Sequence[DisruptionBudget],
    ) -> Iterator[Question]:
        """Ask about the victims on a node as it is now."""
        machine = self._cache.usable_machine(node)
        if isinstance(machine, Unusable):
            return
        uid, ledger = args.pod.uid, self._cache.ledger(node)
        ledger = without(ledger, self._outranked(ledger, args.pod))
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

        A reservation is not: the cache may have it before its pod.
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
        pending, has_claim = self._pending.record(uid), self._cache.ledgers.nodes_claimed_by
        still = {other: since for other, since in pending.leaving.items() if has_claim(other)}
        pending.leaving = dict.fromkeys(leaving, self._clock()) | still

    def _awaited_in_vain(self, uid: PodUid, leaving: frozenset[PodUid]) -> frozenset[PodUid]:
        """Return the pods that count as staying, because the waiting pod has waited for them too long."""
        waiting, oldest = self._pending.record(uid).leaving, self._clock() - limits.LEAVING_S
        return frozenset(other for other in leaving if waiting.get(other, oldest) < oldest)


def _rank(node: NodeName, victims: Victims) -> tuple[object, ...]:
    return victims.cost, victims.quality, node
