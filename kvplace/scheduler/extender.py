"""The three verbs of the extender: filter, prioritize, bind.

Filter decides: it answers with the one best node and holds the cores it would give there, so that the
next pod sees them taken (mode `advise` answers with every node that fits). Bind claims the cores in the
node's ledger and only then binds the pod, with node and cores in one write. It is idempotent by pod
UID: however often and in whatever order kube-scheduler retries, a pod ends with one claim or none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from kvplace.core.cluster.grouped_refusals import grouped
from kvplace.core.cluster.node_choice import Candidate, Strategy, best_candidate, scores, why
from kvplace.core.errors import BadAnnotation, KvplaceError
from kvplace.core.free import Free
from kvplace.core.ledger import claim_of
from kvplace.core.refusal import Refusal
from kvplace.core.request import OnFailure, Request
from kvplace.core.request_document import PodRequest
from kvplace.kube.cluster import Cluster
from kvplace.kube.events import EventRecorder, does_not_fit, vmi_reference
from kvplace.kube.records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable
from kvplace.scheduler.binder import Binder
from kvplace.scheduler.claims import placed_again, rfc3339
from kvplace.scheduler.fit import FitTable
from kvplace.scheduler.holds import Holds
from kvplace.scheduler.metrics import BINDS, FILTERS, REFUSALS
from kvplace.scheduler.wire import (
    BindingArgs,
    BindingResult,
    ExtenderArgs,
    FilterResult,
    HostPriority,
    WirePod,
)
from kvplace.scheduler.wishes import Wishes

log = logging.getLogger(__name__)


class Mode(Enum):
    """Who chooses the node (`serve --mode`)."""

    DECIDE = "decide"
    ADVISE = "advise"


@dataclass(frozen=True, slots=True)
class ExtenderSettings:
    """How the extender decides."""

    strategy: Strategy = Strategy.PACK
    """How nodes are chosen where VMs sit equally well."""
    mode: Mode = Mode.DECIDE
    """`decide`: filter answers with one node; `advise`: with all that fit, so other plugins' scores count."""
    bind_seconds: float = 8.0
    """How long a bind may go on; below the extender's httpTimeout of 10 s in our scheduler configuration."""
    bind_pause_seconds: float = 0.1
    """Pause before a binding of unknown outcome is looked at again; doubles each time."""
    hold_seconds: float = 30.0
    """How long the cores that filter promised to a pod are held for its bind."""


class Extender:
    """Answers kube-scheduler from the node cache; writes through the cluster port."""

    def __init__(
        self,
        cluster: Cluster,
        cache: NodeCache,
        events: EventRecorder,
        settings: ExtenderSettings | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` dates claims, `clock` times holds."""
        self._cluster = cluster
        self._cache = cache
        self._settings = settings or ExtenderSettings()
        self._now = now
        self._events = events
        self._fits = FitTable(lambda node: cache.snapshot(node, self.holds.on_node(node)))
        self.holds = Holds(seconds=self._settings.hold_seconds, clock=clock, changed=self._fits.node_changed)
        self._wishes = Wishes(cluster, cache)
        cache.subscribe(self._fits.node_changed)
        cache.pods.subscribe(self._pod_seen)
        self.binder = Binder(
            cluster,
            cache,
            self.holds,
            self._wishes,
            self._events,
            seconds=self._settings.bind_seconds,
            pause_seconds=self._settings.bind_pause_seconds,
            now=now,
        )

    # Filter and prioritize.

    async def filter(self, args: ExtenderArgs) -> FilterResult:
        """Answer which of the given nodes can hold the pod, or why none can."""
        started = time.perf_counter()
        try:
            return self._filter(args)
        finally:
            FILTERS.observe(time.perf_counter() - started)

    def _filter(self, args: ExtenderArgs) -> FilterResult:
        if not self._cache.has_synced:
            return FilterResult(error="kvplace has not read the cluster yet; it will in a moment")
        try:
            asked = self._wishes.of_wire(args.pod)
        except BadAnnotation as error:
            return _answer(args, [], unresolvable=dict.fromkeys(args.names, str(error)))
        if asked is None:
            return FilterResult(
                error="the pod asks for cores (resource kvplace.io/vm) but carries no kvplace.io/request: "
                "it was created while kvplace's admission was not in place; delete it to have it made anew"
            )
        wanted = asked.wanted
        self.holds.drop_expired()
        self.holds.drop(args.pod.metadata.uid)
        answers = self._fits.answers(args.names, wanted.request)
        claimed = self._claimed(args.pod.metadata.uid, answers, wanted.request)
        if claimed and self._settings.mode is Mode.DECIDE:
            return _answer(args, [min(claimed)])
        answers |= claimed
        candidates: list[Candidate] = []
        refusals: dict[str, Refusal] = {}
        for node, answer in answers.items():
            if isinstance(answer, Candidate):
                candidates.append(answer)
            else:
                refusals[node] = answer
        best = best_candidate(candidates, self._settings.strategy)
        if best is None:
            return self._none_fits(args, wanted, refusals)
        if wanted.explain:
            self._wishes.explanations[args.pod.metadata.uid] = _explain(
                best, candidates, refusals, self._settings.strategy
            )
        # Why the others do not fit is of no use to a pod that has a node, and dear to say at every pod.
        if self._settings.mode is Mode.ADVISE:
            return _answer(args, [c.node for c in candidates])
        metadata = args.pod.metadata
        claim = claim_of(
            metadata.uid,
            best.placement,
            namespace=metadata.namespace,
            pod=metadata.name,
            vmi=wanted.vmi.rpartition("/")[2],
            since=rfc3339(self._now()),
        )
        self.holds.hold(best.node, claim)
        return _answer(args, [best.node])

    def _none_fits(
        self, args: ExtenderArgs, wanted: PodRequest, refusals: dict[str, Refusal]
    ) -> FilterResult:
        told = grouped(refusals)
        for reason in {refusal.reason for refusal in refusals.values()}:
            REFUSALS.labels(reason.value).inc()
        if wanted.request.options.on_failure is OnFailure.FLOAT:
            return _answer(args, list(args.names))
        self._tell_owner(args.pod, told.summary)
        return _answer(args, [], told.failed, told.unresolvable)

    def _claimed(self, uid: str, nodes: Collection[str], request: Request) -> dict[str, Candidate]:
        """Where a pod has cores already, from an attempt whose binding did not come; they are its alone."""
        found: dict[str, Candidate] = {}
        for node in self._cache.ledgers.nodes_claimed_by(uid):
            machine = self._cache.machine(node)
            if node not in nodes or isinstance(machine, Unusable):
                continue
            claim = self._cache.ledger(node).claims.get(uid)
            placement = placed_again(machine.topology, request, claim) if claim is not None else None
            if placement is not None:
                own = Free(placement.owned, placement.cpus)
                found[node] = Candidate(node, machine.topology, placement, own, request.vcpus)
        return found

    async def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Score the nodes from 0 to 10 by how well the pod would sit there; 0 where it does not fit."""
        try:
            asked = self._wishes.of_wire(args.pod)
        except BadAnnotation:
            asked = None
        if asked is None:
            return [HostPriority(node, 0) for node in args.names]
        request = asked.wanted.request
        uid = args.pod.metadata.uid
        if self._settings.mode is Mode.ADVISE:
            self.holds.drop(uid)
        found = self._fits.answers(args.names, request)
        held = {node for node in args.names if self.holds.of_pod(uid, node)}
        held |= self._claimed(uid, found, request).keys()
        known = scores((c for c in found.values() if isinstance(c, Candidate)), self._settings.strategy)
        return [HostPriority(node, 10 if node in held else known.get(node, 0)) for node in args.names]

    # Bind.

    async def bind(self, args: BindingArgs) -> BindingResult:
        """Claim cores on the node and bind the pod to it with them; an empty error means that it is done.

        A bind that was already done answers yes. A second call for a pod whose bind is under way waits for
        that one. The work goes on when the caller gives up, so that a late success is still complete.
        """
        started = time.perf_counter()
        try:
            await asyncio.shield(self.binder.begin(args))
            result = BindingResult()
        except KvplaceError as error:
            result = BindingResult(str(error))
        BINDS.labels("bound" if not result.error else "refused").observe(time.perf_counter() - started)
        return result

    def _tell_owner(self, pod: WirePod, why: str) -> None:
        """Tell the owner of a VM why it waits; kube-scheduler itself tells the pod's (FailedScheduling)."""
        owner = pod.vmi
        if owner is not None:
            self._events.record(
                does_not_fit(vmi_reference(pod.metadata.namespace, owner.name, owner.uid), why)
            )

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        pod = after or before
        if pod is not None and (after is None or after.node):
            self.holds.drop(pod.uid)


def _answer(
    args: ExtenderArgs,
    names: list[str],
    failed: Mapping[str, str] | None = None,
    unresolvable: Mapping[str, str] | None = None,
) -> FilterResult:
    if args.nodes is None:
        return FilterResult(names=names, failed=dict(failed or {}), unresolvable=dict(unresolvable or {}))
    return FilterResult(
        nodes={"items": [args.nodes[name] for name in names]},
        failed=dict(failed or {}),
        unresolvable=dict(unresolvable or {}),
    )


def _explain(
    best: Candidate, candidates: list[Candidate], refusals: Mapping[str, Refusal], strategy: Strategy
) -> str:
    others = [candidate for candidate in candidates if candidate is not best]
    next_best = best_candidate(others, strategy)
    told = grouped(refusals).summary
    text = f"{best.node} of {len(candidates)} that fit"
    if next_best is not None:
        text += f" (also {', '.join(sorted(one.node for one in others)[:10])})"
        text += f"; before {next_best.node}: {why(best, next_best, strategy)}"
    return (f"{text}; {told}" if told else text)[:4000]
