"""The verbs of the extender: filter, prioritize, preempt, bind.

Filter answers with the one best node and holds the cores there, so that the next pod finds them taken. In
mode `advise` it answers with every node that fits. Bind claims the cores in the node's ledger and only then
binds the pod, with node and cores in one write (`Binder`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from kvplace.core.allocator.allocate import try_place
from kvplace.core.claim_changes import grown_claim
from kvplace.core.cluster.node_choice import (
    Candidate,
    Fit,
    GroupedRefusals,
    Strategy,
    best_candidate,
    grouped,
    scores,
)
from kvplace.core.errors import BadAnnotation, Conflict, KvplaceError, Refused, Unavailable
from kvplace.core.free_resources import Free
from kvplace.core.ledger import Claim, LedgerChange
from kvplace.core.placement import Refusal
from kvplace.core.request import OnFailure, Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.concurrency import Turns
from kvplace.kube.events import EventReason, EventRecord, EventRecorder
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable
from kvplace.scheduler.binder import Binder
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.extender_protocol import (
    BindingArgs,
    BindingResult,
    ExtenderArgs,
    FilterResult,
    HostPriority,
    NodeVictims,
    PreemptionArgs,
)
from kvplace.scheduler.fit_table import FitTable
from kvplace.scheduler.joint_plan import (
    JointPlan,
    Nominations,
    explain_choice,
    is_about_nominated_node,
)
from kvplace.scheduler.metrics import BINDS, FILTERS, PREEMPTION_SECONDS, PREEMPTIONS, PRIORITIZES, REFUSALS
from kvplace.scheduler.pending_pods import Hold, PendingPod, PendingPods, PendingRequest
from kvplace.scheduler.preemptor import Preemptor
from kvplace.scheduler.reservations import Background, RoomContext
from kvplace.scheduler.resource_claims import ResourceClaims
from kvplace.scheduler.room_maker import MakeRoom, RoomMaker
from kvplace.scheduler.stored_claims import migration_target, placement_of_claim

log = logging.getLogger(__name__)


class Mode(Enum):
    """The component that chooses the node (`serve --mode`)."""

    DECIDE = "decide"
    ADVISE = "advise"


@dataclass(frozen=True, slots=True)
class ExtenderSettings:
    """The choices of an operator for the extender."""

    strategy: Strategy = Strategy.PACK
    """The choice between nodes with equally good placements."""
    mode: Mode = Mode.DECIDE
    """`decide`: filter answers with one node; `advise`: with all that fit, so other plugins' scores count."""
    hold_seconds: float = 30.0
    """The time that a pod has from Filter to its bind while Filter holds its cores."""
    bind_seconds: float = 8.0
    """The longest time of a bind; below the extender's httpTimeout of 10 s in our scheduler configuration."""
    nominate_from_nodes: int = 1000
    """The least number of nodes of a cluster where nodes of planned pods are nominated; 0: never."""
    make_room: MakeRoom = MakeRoom.OFF
    """Whether movable VMs make room for VMs that fit nowhere."""


class Extender:
    """Answers kube-scheduler from the node cache; only binds and nominations write."""

    def __init__(
        self,
        cluster: SchedulerClient,
        cache: NodeCache,
        events: EventRecorder,
        settings: ExtenderSettings | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
        background: Background = asyncio.to_thread,
    ) -> None:
        """`now` dates claims, `clock` times holds, `background` runs long searches."""
        self._cache = cache
        self._events = events
        self._settings = settings or ExtenderSettings()
        self.pending = PendingPods(cluster, cache, hold_seconds=self._settings.hold_seconds, clock=clock)
        self._fits = FitTable(self.pending.snapshot, self._settings.strategy)
        self.nominations = Nominations(
            cluster, cache, self.pending, from_nodes=self._settings.nominate_from_nodes
        )
        self._plan = JointPlan(cache, self.pending, self._fits, self.nominations, self._settings.strategy)
        strategy = self._settings.strategy
        context = RoomContext(cluster, cache, self.pending, events, strategy, now, clock, background)
        self._preemptor = Preemptor(context)
        self.room = RoomMaker(context, self._settings.make_room)
        self._resource_claims = ResourceClaims(cluster, cache, self.pending, now)
        for node_changed in (self._fits.node_changed, self._resource_claims.node_changed):
            cache.subscribe(node_changed)
            self.pending.subscribe_changes(node_changed)
        self.binder = Binder(
            cluster,
            cache,
            self.pending,
            self._resource_claims,
            events,
            seconds=self._settings.bind_seconds,
            now=now,
            clock=clock,
        )

    async def describe_nodes(self) -> None:
        """Describe every node, so that the first question after the start need not."""
        await self._fits.describe(self._cache.nodes.records)

    async def filter(self, args: ExtenderArgs) -> FilterResult:
        """Answer with the given nodes that can hold the pod, or with the refusals of all nodes."""
        if not self._cache.has_synced:
            return FilterResult(error="kvplace has not read the cluster yet; it will in a moment")
        started, refusal = time.perf_counter(), ""
        pending = self.pending.begin(args.pod.uid)
        try:
            result = await self._filter(args, pending)
            refusal = result.refusal
        finally:
            FILTERS.observe(time.perf_counter() - started)
            is_news = self.pending.answered(pending, refusal)
        if refusal and is_news:
            about = {**args.about, "attempt": pending.attempts}
            log.info("does not fit: %s", refusal, extra=about)
        return result

    async def _filter(self, args: ExtenderArgs, pending: PendingPod) -> FilterResult:
        """Answer a filter call.

        1. Read the request of the pod.
        2. A pod that has a claim from an earlier attempt, or along with another pod's, goes to its node.
        3. A planned pod goes to the node of its plan.
        4. Otherwise choose the best node, hold the cores there, and plan the pods that wait beside it. For a
           pod with devices of resource claims it is the best beside the first free devices of each node.
        5. If no node can hold the pod, answer with the refusals.

        Steps 2 to 5 consider only nodes with room beside the pod's devices.
        """
        try:
            requested = self.pending.request_of(args.pod)
        except BadAnnotation as error:
            return FilterResult.rejecting(args, dict.fromkeys(args.names, str(error)))
        if requested is None:
            return FilterResult(
                error="the pod requests cores (resource kvplace.io/vm) but has no kvplace.io/request: "
                "it was created without kvplace's webhooks; delete it to have it created again"
            )
        nodes = await self._resource_claims.examine(args.pod, requested, pending, args.names)
        refused = nodes.refused
        if not refused:
            return await self._choose(args, requested, pending, nodes.beside)
        left = args.only([node for node in args.names if node not in refused])
        if left.names:
            return (await self._choose(left, requested, pending, nodes.beside)).refusing(refused)
        self.pending.give_up(pending)
        if requested.pod_request.request.options.on_failure is OnFailure.FLOAT:
            return FilterResult.passing(args, [*args.names])
        return FilterResult.rejecting(args, refused)

    async def _choose(
        self,
        args: ExtenderArgs,
        requested: PendingRequest,
        pending: PendingPod,
        beside: Mapping[Request, Collection[NodeName]],
    ) -> FilterResult:
        """Answer a filter call about nodes with room `beside` the pod's devices."""
        uid, request = args.pod.uid, requested.pod_request.request
        deciding = self._settings.mode is Mode.DECIDE
        claimed = self._claimed(uid, args.names, request)
        target = migration_target(self._cache, requested) if requested.migration and not claimed else None
        if pending.hold is not None:
            planned = pending.hold
            is_planned = deciding and pending.is_planned and not (claimed or target)
            if is_planned and self._plan.offer(args.pod, planned, args.names):
                await self._plan.plan_ahead(args.pod, args.names)
                return FilterResult.passing(args, [planned.node])
            self.pending.give_up(pending)
        if target is not None:
            return self._offer_target(args, requested, *target)
        if deciding and claimed:
            await self._plan.plan_ahead(args.pod, args.names)
            return FilterResult.passing(args, [min(claimed)])
        if deciding:
            best = await self._best_beside_devices(requested, pending, beside) if beside else None
            if best is not None:
                self.pending.hold(Hold.of(args.pod, requested, best))
                return FilterResult.passing(args, [best.node])
            chosen = await self._plan.place(args.pod, requested, args.names)
            if chosen is not None:
                return FilterResult.passing(args, [chosen])
            groups = await self._fits.refusals(args.names, request)
            if groups is not None:
                return await self._none_fits(args, requested, pending, groups)

        turns = Turns()
        answers = await self._fits.answers(args.names, request, turns) | claimed
        candidates = [answer for answer in answers.values() if isinstance(answer, Candidate)]
        refusals = {node: answer for node, answer in answers.items() if isinstance(answer, Refusal)}
        best = best_candidate(candidates, self._settings.strategy)
        if best is None:
            await turns.spend(len(refusals))
            return await self._none_fits(args, requested, pending, grouped(refusals))

        if not deciding:
            if requested.pod_request.explain:
                others = (candidate for candidate in candidates if candidate is not best)
                next_best = best_candidate(others, self._settings.strategy)
                ranked = explain_choice(best, next_best, self._settings.strategy)
                pending.explanation = f"kube-scheduler chose; kvplace ranks first {ranked}"
            return FilterResult.passing(args, [candidate.node for candidate in candidates])
        self.pending.hold(Hold.of(args.pod, requested, best))
        return FilterResult.passing(args, [best.node])

    async def _best_beside_devices(
        self, requested: PendingRequest, pending: PendingPod, requests: Mapping[Request, Collection[NodeName]]
    ) -> Candidate | None:
        """Choose the best node for one of the requests, each with its nodes; None if none fits."""
        strategy = self._settings.strategy
        found: list[tuple[Candidate, Request]] = []
        for request, names in requests.items():
            two = await self._fits.two_best(names, request)
            found += [(one, request) for one in two if one is not None]
        if not found:
            return None
        found.sort(key=lambda one: one[0].rank(strategy))
        (best, request), *others = found
        if requested.pod_request.explain:
            next_best = others[0][0] if others else None
            pending.explanation = explain_choice(best, next_best, strategy)
        return await self._fits.best([best.node], request)  # others have had their turn meanwhile

    def _offer_target(
        self, args: ExtenderArgs, requested: PendingRequest, node: NodeName, kept: Claim
    ) -> FilterResult:
        """Offer the pod of a migration its target, and no other node: room is made with this target."""
        machine, ledger = self._cache.machine(node), self._cache.ledger(node)
        others = ledger.after(LedgerChange(releases=(kept.uid,)))
        if node not in args.names or isinstance(machine, Unusable):
            why = f"migration {requested.migration} goes to node {node}, which kube-scheduler does not offer"
            return FilterResult.rejecting(args, dict.fromkeys(args.names, why))
        request = requested.pod_request.request
        if placement_of_claim(machine.topology, request, kept) is None:
            free = machine.free(others, self.pending.held_on(node))
            if try_place(machine.topology, free, request) is None:
                why = f"the VM has changed since its place on node {node} was reserved"
                return FilterResult.rejecting(args, dict.fromkeys(args.names, why))
        return FilterResult.passing(args, [node])

    async def _none_fits(
        self, args: ExtenderArgs, requested: PendingRequest, pending: PendingPod, groups: GroupedRefusals
    ) -> FilterResult:
        request = requested.pod_request.request
        if await self._preemptor.outranks(args.pod, args.names, request):
            claimed = self._claimed(args.pod.uid, args.names, request)
            if claimed:
                return FilterResult.passing(args, [min(claimed)])
        may_be_offered_more = is_about_nominated_node(args.pod, args.names)
        if may_be_offered_more and not self.pending.nominated_refused_twice(pending):
            return FilterResult.rejecting(args, groups.texts)
        for reason in {group.refusal.reason for group in groups.groups}:
            REFUSALS.labels(reason.value).inc()
        if request.options.on_failure is OnFailure.FLOAT:
            return FilterResult.passing(args, [*args.names])
        if requested.vmi is not None:  # on the pod, kube-scheduler itself writes FailedScheduling
            self._events.record(EventRecord(requested.vmi, EventReason.DOES_NOT_FIT, groups.summary))
        self.room.fits_nowhere(args.pod, requested, groups.curable)
        if self._cache.has_bound_pod_below(args.pod.priority):
            self._preemptor.refused(pending, groups.curable)
        return FilterResult.rejecting(args, groups.texts)

    def _claimed(
        self, uid: PodUid, nodes: Collection[NodeName], request: Request
    ) -> dict[NodeName, Candidate]:
        """Return the nodes where a pod has a claim from an attempt without a binding.

        Also the nodes with a reservation for it, once it fits there.
        """
        found: dict[NodeName, Candidate] = {}
        for node in self._cache.ledgers.nodes_claimed_by(uid):
            machine = self._cache.machine(node)
            claim = self._cache.ledger(node).claims.get(uid)
            if node not in nodes or isinstance(machine, Unusable) or claim is None:
                continue
            ledger = self._cache.ledger(node)
            with_freed_cpus = grown_claim(ledger, claim)
            placement = placement_of_claim(machine.topology, request, with_freed_cpus)
            if placement is None and claim.reserved is not None:  # it fits otherwise, or shares CPUs
                others = ledger.after(LedgerChange(releases=(uid,)))
                holds = self.pending.held_on(node, but=uid)
                free = machine.free(others, holds, self._cache.free_devices(machine, others, holds))
                placement = try_place(machine.topology, free, request)
            if placement is not None:
                own = Free(placement.owned, placement.cpus)
                found[node] = Candidate(node, Fit.of(machine.topology, own, request, placement))
        return found

    async def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Score the nodes from 0 to 10 by how good the pod's placement would be; 0 where it does not fit."""
        with PRIORITIZES.time():
            return await self._prioritize(args)

    async def _prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        try:
            requested = self.pending.request_of(args.pod)
        except BadAnnotation:
            requested = None
        if requested is None:
            return [HostPriority(node, 0) for node in args.names]
        uid, request = args.pod.uid, requested.pod_request.request
        turns = Turns()
        answers = await self._fits.answers(args.names, request, turns)
        await turns.spend(len(answers))
        taken: set[str] = {node for node in args.names if self.pending.hold_of(uid, node)}
        taken |= self._claimed(uid, args.names, request).keys()
        fitting = (answer for answer in answers.values() if isinstance(answer, Candidate))
        known = scores(fitting, self._settings.strategy)
        return [HostPriority(node, 10 if node in taken else known.get(node, 0)) for node in args.names]

    async def preempt(self, args: PreemptionArgs) -> Mapping[NodeName, NodeVictims]:
        """Answer with the victims for a pod by node, or with none if it has to wait.

        No pod is evicted while room is being made, or when a reservation exists already.
        """
        with PREEMPTION_SECONDS.time():
            if await self.room.is_under_way(args.pod.uid):
                PREEMPTIONS.labels("making-room").inc()
                return {}
            return await self._preemptor.preempt(args)

    async def bind(self, args: BindingArgs) -> BindingResult:
        """Claim cores on the node and bind the pod with them; an empty error means that the pod is bound.

        The work continues when the caller gives up, so that a late success is complete.
        """
        started = time.perf_counter()
        outcome, result = "bound", BindingResult()
        try:
            await asyncio.shield(self.binder.begin(args))
        except KvplaceError as error:
            outcome, result = _outcome(error), BindingResult(str(error))
        BINDS.labels(outcome).observe(time.perf_counter() - started)
        return result


def _outcome(error: KvplaceError) -> str:
    """Name how a bind failed, for the metric."""
    match error:
        case Refused():
            return "refused"
        case Conflict():
            return "conflict"
        case Unavailable():
            return "unavailable"
        case _:
            return "failed"
