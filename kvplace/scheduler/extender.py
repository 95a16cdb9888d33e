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

from kvplace.core.allocate import place
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadAnnotation, Conflict, KvplaceError, Refused, Unavailable
from kvplace.core.ledger import Claim, Ledger, LedgerChange
from kvplace.core.node_choice import Candidate, Strategy, best_candidate, scores
from kvplace.core.offered import check_offered
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request import OnFailure, Request
from kvplace.core.request_document import PodRequest, read_request
from kvplace.kube.cluster import Cluster
from kvplace.kube.records import EventRecord, EventType, PodRecord
from kvplace.scheduler.annotations import binding_annotations, floating_annotations
from kvplace.scheduler.claims import claim_of, is_bound_as_meant, placed_again, release_of, rfc3339
from kvplace.scheduler.metrics import BINDS, FILTERS, REFUSALS
from kvplace.scheduler.news import News
from kvplace.scheduler.node_book import NodeBook
from kvplace.scheduler.refusals import grouped
from kvplace.scheduler.wire import (
    BindingArgs,
    BindingResult,
    ExtenderArgs,
    FilterResult,
    HostPriority,
    OwnerReference,
    WirePod,
)

log = logging.getLogger(__name__)


class Mode(Enum):
    """Who chooses the node (`serve --mode`)."""

    DECIDE = "decide"
    ADVISE = "advise"


@dataclass(frozen=True, slots=True)
class ExtenderSettings:
    """How the extender decides."""

    strategy: Strategy = Strategy.PACK
    """Whether VMs fill nodes up or spread over them, where they sit equally well."""
    mode: Mode = Mode.DECIDE
    """`decide`: filter answers with one node; `advise`: with all that fit, so other plugins' scores count."""
    bind_seconds: float = 8.0
    """How long a bind may go on; below the extender's httpTimeout of 10 s in our scheduler configuration."""
    bind_pause_seconds: float = 0.1
    """Pause before a binding of unknown outcome is looked at again; doubles each time."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a pod asked for, and for which VMI; forgotten when it is bound or gone."""

    wanted: PodRequest
    vmi: OwnerReference | None


class Extender:
    """Answers kube-scheduler from the node book; writes through the cluster port."""

    def __init__(
        self,
        cluster: Cluster,
        book: NodeBook,
        settings: ExtenderSettings | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster = cluster
        self._book = book
        self._settings = settings or ExtenderSettings()
        self._now = now
        self._asked: dict[str, _Asked] = {}
        self._explanations: dict[str, str] = {}
        self._binding: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._talking: set[asyncio.Task[None]] = set()
        self._news = News()
        book.pods.subscribe(self._pod_seen)

    # Filter and prioritize.

    async def filter(self, args: ExtenderArgs) -> FilterResult:
        """Answer which of the given nodes can hold the pod, or why none can."""
        started = time.perf_counter()
        try:
            return self._filter(args)
        finally:
            FILTERS.observe(time.perf_counter() - started)

    def _filter(self, args: ExtenderArgs) -> FilterResult:
        if not self._book.ready:
            return FilterResult(error="kvplace has not read the cluster yet; it will in a moment")
        try:
            wanted = self._wanted(args.pod)
        except BadAnnotation as error:
            return _answer(args, [], unresolvable=dict.fromkeys(args.names, str(error)))
        if wanted is None:
            return FilterResult(
                error="the pod asks for cores (resource kvplace.io/vm) but carries no kvplace.io/request: "
                "it was created while kvplace's admission was not in place; delete it to have it made anew"
            )
        self._book.holds.drop_expired()
        self._book.holds.drop(args.pod.metadata.uid)
        answers = self._book.fits.answers(args.names, wanted.request)
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
            self._explanations[args.pod.metadata.uid] = _explain(best, candidates, refusals)
        # Why the others do not fit is of no use to a pod that has a node, and dear to say at every pod.
        if self._settings.mode is Mode.ADVISE:
            return _answer(args, [c.node for c in candidates])
        metadata = args.pod.metadata
        claim = self._claim(
            best.placement, wanted, uid=metadata.uid, namespace=metadata.namespace, pod=metadata.name
        )
        self._book.holds.hold(best.node, claim)
        return _answer(args, [best.node])

    def _none_fits(
        self, args: ExtenderArgs, wanted: PodRequest, refusals: dict[str, Refusal]
    ) -> FilterResult:
        told = grouped(refusals)
        for reason in {refusal.reason for refusal in refusals.values()}:
            REFUSALS.labels(reason.value).inc()
        if wanted.request.on_failure is OnFailure.FLOAT:
            return _answer(args, list(args.names))
        self._tell(args.pod, EventType.WARNING, "DoesNotFit", "Placing", told.summary)
        return _answer(args, [], told.failed, told.unresolvable)

    def _claimed(self, uid: str, nodes: Collection[str], request: Request) -> dict[str, Candidate]:
        """Where a pod has cores already, from an attempt whose binding did not come: they are for it alone."""
        found: dict[str, Candidate] = {}
        for node in self._book.ledgers.nodes_claimed_by(uid):
            topology = self._book.topology_of(node)
            if node not in nodes or topology is None:
                continue
            claim = self._book.ledger_of(node).claims.get(uid)
            placement = placed_again(topology, request, claim) if claim is not None else None
            if placement is not None:
                found[node] = Candidate(node, topology, placement, placement.cpus.bit_count())
        return found

    async def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Score the nodes from 0 to 10 by how well the pod would sit there; 0 where it does not fit."""
        try:
            wanted = self._wanted(args.pod)
        except BadAnnotation:
            wanted = None
        if wanted is None:
            return [HostPriority(node, 0) for node in args.names]
        uid = args.pod.metadata.uid
        if self._settings.mode is Mode.ADVISE:
            self._book.holds.drop(uid)
        found = self._book.fits.answers(args.names, wanted.request)
        held = {node for node in args.names if self._book.holds.of_pod(uid, node)}
        held |= self._claimed(uid, found, wanted.request).keys()
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
            await asyncio.shield(self._bind_once(args))
            result = BindingResult()
        except KvplaceError as error:
            result = BindingResult(str(error))
            log.warning(
                "bind refused: %s",
                error,
                extra={"vm": f"{args.namespace}/{args.name}", "node": args.node, "uid": args.uid},
            )
        BINDS.labels("bound" if not result.error else "refused").observe(time.perf_counter() - started)
        return result

    def _bind_once(self, args: BindingArgs) -> asyncio.Task[None]:
        under_way = self._binding.get(args.uid)
        if under_way is not None:
            node, task = under_way
            if node == args.node:
                return task
            raise Conflict(f"a bind of this pod to node {node} is under way")
        task = asyncio.get_running_loop().create_task(self._bind(args))
        self._binding[args.uid] = (args.node, task)
        task.add_done_callback(lambda _: self._binding.pop(args.uid, None))
        return task

    async def _bind(self, args: BindingArgs) -> None:
        if not self._book.ready:
            raise Unavailable("kvplace has not read the cluster yet; it will in a moment")
        if args.node not in self._book.nodes.records:
            raise Refused(f"node {args.node} is not known to the API server")
        known = self._book.pods.get(args.uid)
        if known is not None and known.node == args.node and known.placement:
            return
        asked = await self._asked_by(args)
        wanted, explanation = asked.wanted, self._explanations.get(args.uid, "")
        await self._leave_other_nodes(args)
        topology = self._book.topology_of(args.node)
        try:
            claim, placement = await self._book.ledgers.change(
                args.node, lambda ledger: self._decide(args, wanted, ledger)
            )
        except Refused:
            if wanted.request.on_failure is not OnFailure.FLOAT:
                raise
            await self._bind_pod(args, None, floating_annotations(pod_uid=args.uid, node=args.node))
            self._tell_bound(
                args,
                asked.vmi,
                EventType.WARNING,
                "Floating",
                "nothing fitted, so the VM runs unpinned, as on-failure: float asks",
            )
            return
        self._book.holds.drop(args.uid)
        if topology is None or placement is None:
            await self._release(args)
            raise Conflict(f"node {args.node} has changed since this pod's cores were claimed; decide again")
        annotations = binding_annotations(
            topology,
            placement,
            wanted,
            pod_uid=args.uid,
            node=args.node,
            explanation=explanation,
        )
        await self._bind_pod(args, claim, annotations)
        self._tell_bound(
            args,
            asked.vmi,
            EventType.NORMAL,
            "Placed",
            f"CPUs {format_cpu_list(placement.cpus)} of {args.node}: socket {_listed(placement.packages)}, "
            f"NUMA node {_listed(placement.numa_nodes)}",
        )

    def _decide(
        self, args: BindingArgs, wanted: PodRequest, ledger: Ledger
    ) -> tuple[LedgerChange, tuple[Claim, Placement | None]]:
        """The claim of one pod, given the ledger as it will be: the cores held since filter if still free."""
        topology = self._book.topology_of(args.node)
        if topology is None:
            raise Refused(f"nothing describes node {args.node}: it has neither a NodeTopology nor a cpu-map")
        stored = ledger.claims.get(args.uid)
        if stored is not None:
            return LedgerChange(), (stored, placed_again(topology, wanted.request, stored))
        placement: Placement | Refusal | None = None
        for with_holds in (True, False):
            free = self._book.free_on(args.node, ledger, but=args.uid, with_holds=with_holds)
            assert free is not None
            placement = place(topology, free, wanted.request)
            if isinstance(placement, Placement):
                break
        if not isinstance(placement, Placement):
            raise Refused(f"node {args.node}: {placement.message if placement else 'does not fit'}")
        claim = self._claim(placement, wanted, uid=args.uid, namespace=args.namespace, pod=args.name)
        return LedgerChange(claims=(claim,)), (claim, placement)

    async def _bind_pod(self, args: BindingArgs, claim: Claim | None, annotations: dict[str, str]) -> None:
        """Bind until it is known to be done or known to be impossible; only then is the claim given back.

        A write without an answer may have happened, so the same write is tried again: it answers yes or
        that the pod is bound already, and then the pod itself tells to whom.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.bind_seconds
        pause = self._settings.bind_pause_seconds
        while True:
            try:
                await self._cluster.bind(args.namespace, args.name, args.uid, args.node, annotations)
                return
            except Unavailable:
                if loop.time() + pause > deadline:
                    raise  # the claim stays: the pod may be bound; the controller finds out
                await asyncio.sleep(pause)
                pause *= 2
            except Conflict as error:
                pod = await self._cluster.read_pod(args.namespace, args.name)
                if is_bound_as_meant(pod, uid=args.uid, node=args.node, claim=claim):
                    return
                await self._release(args)
                raise Conflict(
                    f"pod {args.namespace}/{args.name} cannot be bound to {args.node}: {error}"
                ) from error
            except KvplaceError:
                await self._release(args)
                raise

    async def _release(self, args: BindingArgs) -> None:
        await self._release_on(args.node, args.uid)

    async def _release_on(self, node: str, uid: str) -> None:
        await self._book.ledgers.change(node, lambda ledger: (release_of(ledger, uid), None))

    async def _leave_other_nodes(self, args: BindingArgs) -> None:
        """Give back what an earlier attempt claimed on other nodes; void unless the pod is bound there."""
        others = self._book.ledgers.nodes_claimed_by(args.uid) - {args.node}
        if not others:
            return
        pod = await self._cluster.read_pod(args.namespace, args.name)
        if pod is not None and pod.uid == args.uid and pod.node and pod.node != args.node:
            raise Conflict(f"pod {args.namespace}/{args.name} is already bound to {pod.node}")
        for node in sorted(others):
            await self._release_on(node, args.uid)

    # What the pod asked for.

    def _wanted(self, pod: WirePod) -> PodRequest | None:
        if not pod.request:
            return None
        uid = pod.metadata.uid
        asked = self._asked.get(uid)
        if asked is None:
            asked = self._asked[uid] = _Asked(_read_offered(pod.request), pod.vmi)
        return asked.wanted

    async def _asked_by(self, args: BindingArgs) -> _Asked:
        known = self._asked.get(args.uid)
        if known is not None:
            return known
        pod = self._book.pods.get(args.uid) or await self._cluster.read_pod(args.namespace, args.name)
        if pod is None or pod.uid != args.uid:
            raise Refused(f"pod {args.namespace}/{args.name} with UID {args.uid} is gone")
        if not pod.request:
            raise Refused(f"pod {args.namespace}/{args.name} carries no kvplace.io/request")
        return _Asked(_read_offered(pod.request), None)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        pod = after or before
        if pod is not None and (after is None or after.node):
            self._asked.pop(pod.uid, None)
            self._explanations.pop(pod.uid, None)

    def _claim(
        self, placement: Placement, wanted: PodRequest, *, uid: str, namespace: str, pod: str
    ) -> Claim:
        return claim_of(placement, wanted, uid=uid, namespace=namespace, pod=pod, since=rfc3339(self._now()))

    # Telling people.

    def _tell_bound(
        self, args: BindingArgs, vmi: OwnerReference | None, kind: EventType, reason: str, note: str
    ) -> None:
        """Tell the owner of a VM; of a good end a pod hears from kube-scheduler, and it carries its cores."""
        if kind is EventType.WARNING:
            self._record(args.namespace, "Pod", args.name, args.uid, kind, reason, "Binding", note)
        if vmi is not None:
            self._record(
                args.namespace, "VirtualMachineInstance", vmi.name, vmi.uid, kind, reason, "Binding", note
            )

    def _tell(self, pod: WirePod, kind: EventType, reason: str, action: str, note: str) -> None:
        """Tell the owner of a VM; kube-scheduler itself tells the pod's (FailedScheduling)."""
        owner = pod.vmi
        if owner is not None:
            self._record(
                pod.metadata.namespace,
                "VirtualMachineInstance",
                owner.name,
                owner.uid,
                kind,
                reason,
                action,
                note,
            )

    def _record(
        self,
        namespace: str,
        kind: str,
        name: str,
        uid: str,
        type_: EventType,
        reason: str,
        action: str,
        note: str,
    ) -> None:
        if not self._news.is_new((uid, reason)):
            return
        task = asyncio.get_running_loop().create_task(
            self._record_event(EventRecord(namespace, kind, name, uid, type_, reason, action, note))
        )
        self._talking.add(task)
        task.add_done_callback(self._talking.discard)

    async def _record_event(self, event: EventRecord) -> None:
        try:
            await self._cluster.record_event(event)
        except KvplaceError as error:
            log.info("event lost: %s", error, extra={"uid": event.uid})

    async def finish_talking(self) -> None:
        """Wait until all events are written."""
        while self._talking:
            await asyncio.gather(*self._talking, return_exceptions=True)


def _read_offered(text: str) -> PodRequest:
    """Read a request; another replica's admission may be newer and let through what we cannot place."""
    wanted = read_request(text)
    check_offered(wanted.request)
    return wanted


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


def _explain(best: Candidate, candidates: list[Candidate], refusals: Mapping[str, Refusal]) -> str:
    runners_up = sorted(c.node for c in candidates if c.node != best.node)[:10]
    told = grouped(refusals).summary
    text = f"{best.node} of {len(candidates)} that fit"
    if runners_up:
        text += f" (also {', '.join(runners_up)})"
    return (f"{text}; {told}" if told else text)[:4000]


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in ids)
