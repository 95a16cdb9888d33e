"""The three verbs of the extender: filter, prioritize, bind.

Filter decides: it answers with the one best node and holds the cores that it would give there, so that the
next pod finds them taken. In mode `advise` it answers with every node that fits. Bind claims the cores in
the node's ledger and only then binds the pod, with node and cores in one write (`Binder`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from kvplace.core.cluster.grouped_refusals import grouped
from kvplace.core.cluster.node_choice import Candidate, Strategy, best_candidate, scores
from kvplace.core.errors import BadAnnotation, KvplaceError
from kvplace.core.free import Free
from kvplace.core.ledger import claim_of
from kvplace.core.refusal import Refusal
from kvplace.core.request import OnFailure, Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.events import EventRecorder, does_not_fit
from kvplace.kube.records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable
from kvplace.scheduler.binder import Binder, PodClient
from kvplace.scheduler.claims import placement_of_claim
from kvplace.scheduler.explanation import explain_choice
from kvplace.scheduler.extender_protocol import (
    BindingArgs,
    BindingResult,
    ExtenderArgs,
    FilterResult,
    HostPriority,
)
from kvplace.scheduler.fit_table import FitTable
from kvplace.scheduler.holds import Holds
from kvplace.scheduler.metrics import BINDS, FILTERS, REFUSALS
from kvplace.scheduler.pod_requests import AskingPod, PodRequests


class Mode(Enum):
    """Who chooses the node (`serve --mode`)."""

    DECIDE = "decide"
    ADVISE = "advise"


@dataclass(frozen=True, slots=True)
class ExtenderSettings:
    """How the extender decides."""

    strategy: Strategy = Strategy.PACK
    """How to choose between nodes with equally good placements."""
    mode: Mode = Mode.DECIDE
    """`decide`: filter answers with one node; `advise`: with all that fit, so other plugins' scores count."""
    hold_seconds: float = 30.0
    """How long the cores that filter has chosen for a pod are held for its bind."""
    bind_seconds: float = 8.0
    """How long a bind may take; below the extender's httpTimeout of 10 s in our scheduler configuration."""


class Extender:
    """Answers kube-scheduler from the node cache; only bind writes."""

    def __init__(
        self,
        cluster: PodClient,
        cache: NodeCache,
        events: EventRecorder,
        settings: ExtenderSettings | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` dates claims, `clock` times holds."""
        self._cache = cache
        self._events = events
        self._settings = settings or ExtenderSettings()
        self._requests = PodRequests(cluster, cache.pods)
        self._fits = FitTable(lambda node: cache.snapshot(node, self.holds.on_node(node)))
        self.holds = Holds(seconds=self._settings.hold_seconds, clock=clock, changed=self._fits.node_changed)
        cache.subscribe(self._fits.node_changed)
        cache.pods.subscribe(self._pod_seen)
        self.binder = Binder(
            cluster,
            cache,
            self.holds,
            self._requests,
            events,
            seconds=self._settings.bind_seconds,
            now=now,
        )

    async def filter(self, args: ExtenderArgs) -> FilterResult:
        """Answer which of the given nodes can hold the pod, or why none can."""
        started = time.perf_counter()
        try:
            return self._filter(args)
        finally:
            FILTERS.observe(time.perf_counter() - started)

    def _filter(self, args: ExtenderArgs) -> FilterResult:
        """Answer a filter call.

        1. Read what the pod asks for.
        2. A pod that has a claim from an earlier attempt goes to the node of that claim.
        3. Find what every node could give; if none can hold the pod, say why.
        4. Choose the best node and hold there what it would give.
        """
        if not self._cache.has_synced:
            return FilterResult(error="kvplace has not read the cluster yet; it will in a moment")
        try:
            asking = self._requests.read(args.pod)
        except BadAnnotation as error:
            return FilterResult.rejecting(args, {}, dict.fromkeys(args.names, str(error)))
        if asking is None:
            return FilterResult(
                error="the pod asks for cores (resource kvplace.io/vm) but carries no kvplace.io/request: "
                "it was created without kvplace's webhooks; delete it to have it created again"
            )
        uid, request = args.pod.uid, asking.pod_request.request
        deciding = self._settings.mode is Mode.DECIDE
        self.holds.drop_expired()
        self.holds.drop(uid)

        claimed = self._claimed(uid, args.names, request)
        if claimed and deciding:
            return FilterResult.passing(args, [min(claimed)])

        answers = self._fits.answers(args.names, request) | claimed
        candidates = [answer for answer in answers.values() if isinstance(answer, Candidate)]
        refusals = {node: answer for node, answer in answers.items() if isinstance(answer, Refusal)}
        best = best_candidate(candidates, self._settings.strategy)
        if best is None:
            return self._none_fits(args, asking, refusals)

        if asking.pod_request.explain:
            explanation = explain_choice(best, candidates, refusals, self._settings.strategy)
            self._requests.explain(uid, explanation)
        # Why other nodes do not fit is written only for a pod without a node: it takes long for many nodes.
        if not deciding:
            return FilterResult.passing(args, [candidate.node for candidate in candidates])
        self.holds.hold(best.node, claim_of(uid, best.placement))
        return FilterResult.passing(args, [best.node])

    def _none_fits(
        self, args: ExtenderArgs, asking: AskingPod, refusals: Mapping[NodeName, Refusal]
    ) -> FilterResult:
        for reason in {refusal.reason for refusal in refusals.values()}:
            REFUSALS.labels(reason.value).inc()
        if asking.pod_request.request.options.on_failure is OnFailure.FLOAT:
            return FilterResult.passing(args, [*args.names])
        groups = grouped(refusals)
        if asking.vmi is not None:  # on the pod, kube-scheduler itself writes FailedScheduling
            self._events.record(does_not_fit(asking.vmi, groups.summary))
        return FilterResult.rejecting(args, groups.failed, groups.unresolvable)

    def _claimed(
        self, uid: PodUid, nodes: Collection[NodeName], request: Request
    ) -> dict[NodeName, Candidate]:
        """Return where a pod has a claim already, from an attempt whose binding did not come."""
        found: dict[NodeName, Candidate] = {}
        for node in self._cache.ledgers.nodes_claimed_by(uid):
            machine = self._cache.machine(node)
            claim = self._cache.ledger(node).claims.get(uid)
            if node not in nodes or isinstance(machine, Unusable) or claim is None:
                continue
            placement = placement_of_claim(machine.topology, request, claim)
            if placement is not None:
                own = Free(placement.owned, placement.cpus)
                found[node] = Candidate(node, machine.topology, placement, own, request.vcpus)
        return found

    async def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Score the nodes from 0 to 10 by how good the pod's placement would be; 0 where it does not fit."""
        try:
            asking = self._requests.read(args.pod)
        except BadAnnotation:
            asking = None
        if asking is None:
            return [HostPriority(node, 0) for node in args.names]
        uid, request = args.pod.uid, asking.pod_request.request
        answers = self._fits.answers(args.names, request)
        taken: set[str] = {node for node in args.names if self.holds.of_pod(uid, node)}
        taken |= self._claimed(uid, args.names, request).keys()
        fitting = (answer for answer in answers.values() if isinstance(answer, Candidate))
        known = scores(fitting, self._settings.strategy)
        return [HostPriority(node, 10 if node in taken else known.get(node, 0)) for node in args.names]

    async def bind(self, args: BindingArgs) -> BindingResult:
        """Claim cores on the node and bind the pod to it with them; an empty error means that it is done.

        The work goes on when the caller gives up, so that a late success is still complete.
        """
        started = time.perf_counter()
        try:
            await asyncio.shield(self.binder.begin(args))
            result = BindingResult()
        except KvplaceError as error:
            result = BindingResult(str(error))
        BINDS.labels("bound" if not result.error else "refused").observe(time.perf_counter() - started)
        return result

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        pod = after or before
        if pod is not None and (after is None or after.node):
            self.holds.drop(pod.uid)
