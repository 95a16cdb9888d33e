"""Joint plans of waiting pods, in clusters so large that their nodes are nominated.

When kube-scheduler asks about one pod of a rollout, the others usually wait already. They are planned along
with it, over the same nodes: each gets a planned hold, and later calls are answered from it. The first bind
on a node then claims for all that are planned there, in one write of its ledger.

A plan is not a promise. The pod of the present call comes before planned pods: if it fits nowhere else, it
takes the cores of pods with its own or lower priority, which are then planned again.

kube-scheduler tries `status.nominatedNodeName` first, and all other nodes only if that one fails. A
nomination is one more write to the API server for each pod, so it pays in large clusters only. It is a hint:
if it comes too late, or fails, only the cost changes. kube-scheduler gets its answer about a pod after the
nominations of the pods of its plan are written, so that few come too late. A pod that another client has
nominated or bound since it was planned stays as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from itertools import dropwhile, islice, takewhile

from kvplace.core.cluster.node_choice import Candidate, Strategy, best_candidate, candidate_on, why
from kvplace.core.errors import BadAnnotation, Conflict, KvplaceError
from kvplace.core.ledger import Claim, claim_of
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.concurrency import Turns
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeSnapshot, Unusable
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.fit_table import FitTable
from kvplace.scheduler.metrics import NOMINATIONS, PLANNED
from kvplace.scheduler.pending_pods import Hold, PendingPod, PendingPods, PendingRequest
from kvplace.scheduler.waiting_pods import waits

log = logging.getLogger(__name__)

TAKEN = "no other room in the cluster, so pods planned for this node later give way"


def explain_choice(best: Candidate, next_best: Candidate | None, strategy: Strategy) -> str:
    """Write how local the pod is on the best node, and the advantage of this node over the next best."""
    reason = "no other node fits"
    if next_best is not None:
        reason = f"before {next_best.node}: {why(best, next_best, strategy)}"
    return explain_placement(best.node, best.placement, reason)


def explain_placement(node: NodeName, placement: Placement, reason: str) -> str:
    """Write how local the pod is on a node, and the reason for this node."""
    counts = (
        counted(len(placement.packages), "socket"),
        counted(len(placement.numa_nodes), "NUMA node"),
        counted(len(placement.l3_groups), "L3 group"),
    )
    return f"{node} ({', '.join(counts)}); {reason}"


TOGETHER = 64
"""Pods that are planned together at most.

kube-scheduler is through with nominated pods in no time and binds all of them at once: with 256, a busy API
server did not bind the last ones before their binds timed out.
"""
OFFER_S = 5.0
"""Lifetime of an offer; a node that is new, or free again, is considered only after it."""
_SHAPES = 64
"""The most shapes with remembered offers."""
_PLACE_STEPS = 700
"""Steps of one placement, or of the choice of a node."""

STREAM_S = 1.0
"""A pod that comes this long after the last one does not wait for others."""
GATHER_S = 0.25
"""The longest wait of a pod for others: at thirty pods a second, for seven of them."""
QUIET_S = 0.1
"""The stream has ended when no pod has come for this long."""


_AT_ONCE = 4
"""Concurrent nominations: enough to stay ahead of kube-scheduler, and few enough not to delay binds."""
_PATIENCE_S = 1.0
"""The longest delay of kube-scheduler's answer: a check of all nodes for every pod costs it more."""
_ATTEMPTS = 3
_WATCH_S = 0.5
"""The longest wait of a nomination until the watch brings a newer version of the pod."""


class Nominations:
    """Writes the nominations of planned pods, in kube-scheduler's order."""

    def __init__(
        self, cluster: SchedulerClient, cache: NodeCache, pending: PendingPods, *, from_nodes: int
    ) -> None:
        """Nominate in clusters of at least `from_nodes` nodes; 0: never."""
        self._cluster = cluster
        self._cache = cache
        self._pending = pending
        self._from_nodes = from_nodes
        self._due: asyncio.Queue[tuple[PendingPod, NodeName]] = asyncio.Queue()

    @property
    def pay(self) -> bool:
        """Whether the cluster is so large that checking all nodes costs more than a nomination."""
        return 0 < self._from_nodes <= len(self._cache.nodes.records)

    def add(self, pending: PendingPod, node: NodeName) -> None:
        """Nominate a node for a planned pod soon, if the cluster is large enough."""
        if self.pay:
            pending.nomination = node
            self._due.put_nowait((pending, node))

    async def written(self) -> None:
        """Wait until nothing is left to nominate, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._due.join()

    async def run(self) -> None:
        """Nominate until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(self._nominate_all())

    async def _nominate_all(self) -> None:
        while True:
            pending, node = await self._due.get()
            try:
                outcome = await self._write(pending, node)
            finally:
                self._due.task_done()
            NOMINATIONS.labels(outcome).inc()
            if outcome != "written" and pending.nomination == node:
                pending.nomination = None

    async def _write(self, pending: PendingPod, node: NodeName) -> str:
        """Nominate a node, and return the outcome once the watch has brought the nomination.

        KubeVirt writes the status of a pod right after it has created it. So a pod that has changed is tried
        again as it is now.
        """
        uid = pending.uid
        refusal: KvplaceError | None = None
        for _ in range(_ATTEMPTS):
            pod = self._cache.pods.get(uid)
            if pod is None or not waits(pod) or not self._is_due(pending, node):
                return "dropped"
            try:
                await self._cluster.nominate_node(pod, node)
            except Conflict as error:
                refusal = error
                await self._until_newer(pod)
            except KvplaceError as error:
                refusal = error
                break
            else:
                await self._until_newer(pod)
                return "written"
        log.info("node %s is not nominated: %s", node, refusal, extra={"uid": uid, "node": node})
        return "failed"

    async def _until_newer(self, pod: PodRecord) -> None:
        """Wait until the watch has brought a pod as it is now, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WATCH_S):
                while self._cache.pods.get(pod.uid) == pod:
                    await self._pending.waiting.news()

    def _is_due(self, pending: PendingPod, node: NodeName) -> bool:
        """Whether a pod still goes to a node: by the plan, or by a claim that was stored along."""
        is_claimed = node in self._cache.ledgers.nodes_claimed_by(pending.uid)
        return pending.nomination == node and (is_claimed or self._pending.planned_node(pending.uid) == node)


class JointPlan:
    """Chooses nodes and holds their cores, for one pod or for all that wait beside it."""

    def __init__(
        self,
        cache: NodeCache,
        pending: PendingPods,
        fits: FitTable,
        nominations: Nominations,
        strategy: Strategy,
    ) -> None:
        self._cache = cache
        self._pending = pending
        self._fits = fits
        self._nominations = nominations
        self._strategy = strategy
        self._offers: OrderedDict[bytes, tuple[float, frozenset[NodeName]]] = OrderedDict()
        """The nodes that kube-scheduler has offered last, and when, by the shape of the pod."""
        self._gathered_at = float("-inf")
        self._arrived = 0
        """The number of pods that had arrived at that time."""

    def offer(self, pod: PodRecord, planned: Hold, names: Collection[NodeName]) -> bool:
        """Offer a pod the node that is planned for it; returns whether the pod still can go there.

        If kube-scheduler offers many nodes without this one, it has rejected this node for a reason of its
        own. It will reject it for the other pods that are planned there, too.
        """
        node = planned.node
        if node not in names:
            if not is_about_nominated_node(pod, names):
                for uid in self._pending.planned_on(node):
                    self._pending.leave(uid)
            return False
        snapshot = self._pending.snapshot(node, but=pod.uid)
        if isinstance(snapshot, Unusable) or not snapshot.free.can_give(planned.claim):
            return False
        self._pending.asked(pod.uid)
        return True

    async def place(
        self, pod: PodRecord, requested: PendingRequest, names: Collection[NodeName]
    ) -> NodeName | None:
        """Hold cores for a pod and for the pods that wait beside it; return the node of the pod itself.

        1. Pods of higher priority come before it, as with kube-scheduler.
        2. The pod itself comes next. If it fits nowhere, it takes the cores of pods that are only planned.
        3. The other pods follow, in kube-scheduler's order.

        If nodes are nominated, it waits for more pods first, and for the nominations at the end. Otherwise
        kube-scheduler, which tries one pod after the other, would check all nodes for the next pod.
        """
        if not self._nominations.pay:
            best = await self._place(pod, requested, names)
            return best.node if best is not None else None
        names = self._fits.set_of(names)
        self._remember_offer(pod, names)
        beside = await self._beside(pod, names)
        turns = Turns()
        used: set[NodeName] = set()
        await self._plan(takewhile(lambda one: one.priority > pod.priority, beside), names, turns, used)
        await turns.spend(_PLACE_STEPS)
        best = await self._place(pod, requested, names)
        if best is not None:
            used.add(best.node)
        rest = dropwhile(lambda one: one.priority > pod.priority, beside)
        await self._plan(rest, names, turns, used)
        await self._nominations.written()
        return self._pending.node_of(pod.uid)

    async def plan_ahead(self, pod: PodRecord, names: Collection[NodeName]) -> None:
        """Plan the pods behind a pod that has its node, so that kube-scheduler finds them nominated.

        Called before kube-scheduler gets its answer. If it has no other nominated pod to try, the next pods
        are planned over the nodes that it has offered a moment ago for a pod of the same shape.
        """
        known = self._cache.pods.get(pod.uid)
        if known is None or not known.shape or not self._nominations.pay:
            return
        self._remember_offer(pod, frozenset(names))
        offered_at, offered = self._offers.get(known.shape, (float("-inf"), frozenset()))
        is_recent = asyncio.get_running_loop().time() - offered_at < OFFER_S
        if is_recent and not self._pending.is_nominated_pod_ahead:
            await self._gather(known.shape)
            await self._plan(self._others_of(known), offered, Turns(), set())
        await self._nominations.written()

    async def _place(
        self, pod: PodRecord, requested: PendingRequest, names: Collection[NodeName]
    ) -> Candidate | None:
        """Hold cores for one pod; it takes the cores of planned pods if no others are left."""
        best = await self._best(pod, requested, names)
        if best is None:
            best = await self._take_over(pod, requested.pod_request.request, names)
            if best is not None and requested.pod_request.explain:
                why_there = explain_placement(best.node, best.placement, TAKEN)
                self._pending.record(pod.uid).explanation = why_there
        if best is not None:
            self._pending.hold(Hold.of(pod, requested, best))
        return best

    async def _best(
        self,
        pod: PodRecord,
        requested: PendingRequest,
        names: Collection[NodeName],
        preferred: AbstractSet[NodeName] = frozenset(),
    ) -> Candidate | None:
        request = requested.pod_request.request
        if not requested.pod_request.explain:
            return await self._fits.best(names, request, preferred=preferred)
        best, next_best = await self._fits.two_best(names, request, preferred=preferred)
        if best is not None:
            self._pending.record(pod.uid).explanation = explain_choice(best, next_best, self._strategy)
        return best

    async def _beside(self, pod: PodRecord, names: Collection[NodeName]) -> list[PodRecord]:
        """Return the pods to be planned along with one, in kube-scheduler's order; gather them first."""
        if is_about_nominated_node(pod, names):
            return []
        known = self._cache.pods.get(pod.uid)
        if known is not None and waits(known) and len(names) > 1:
            await self._gather(known.shape)
            known = self._cache.pods.get(pod.uid)
        return self._others_of(known) if known is not None and waits(known) else []

    async def _gather(self, shape: bytes) -> None:
        """Wait a moment for more pods of a shape, if pods come in a stream.

        The first pod of a plan costs kube-scheduler a check of all nodes, and each nominated pod a check of
        one node. VMs of a rollout arrive some dozens a second. If no pod has come since the last call, all
        pods of the rollout are there already.
        """
        loop = asyncio.get_running_loop()
        if self._pending.waiting.arrived > self._arrived and loop.time() - self._gathered_at < STREAM_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._pending.waiting.until_waiting(shape, TOGETHER, quiet_s=QUIET_S)
        self._gathered_at, self._arrived = loop.time(), self._pending.waiting.arrived

    def _others_of(self, pod: PodRecord) -> list[PodRecord]:
        """Return pods of a pod's shape that wait and have no node yet, in kube-scheduler's order."""
        others = (
            one
            for one in self._pending.waiting.of_shape(pod.shape)
            if one.uid != pod.uid and self._is_undecided(one)
        )
        return list(islice(others, TOGETHER - 1))

    def _remember_offer(self, pod: PodRecord, names: frozenset[NodeName]) -> None:
        """Keep the offered nodes for the pods behind this one.

        kube-scheduler's plugins accept the same nodes for pods of one shape, unless the pods request other
        amounts or a node has changed. Then it refuses the nominated node, checks all nodes, and offers
        other ones.
        """
        known = self._cache.pods.get(pod.uid)
        if known is None or is_about_nominated_node(pod, names):
            return
        self._offers[known.shape] = asyncio.get_running_loop().time(), names
        self._offers.move_to_end(known.shape)
        if len(self._offers) > _SHAPES:
            self._offers.popitem(last=False)

    def _is_undecided(self, pod: PodRecord) -> bool:
        return self._pending.hold_of(pod.uid) is None and not self._cache.ledgers.nodes_claimed_by(pod.uid)

    async def _plan(
        self, pods: Iterable[PodRecord], names: frozenset[NodeName], turns: Turns, used: set[NodeName]
    ) -> None:
        """Hold cores for pods in their order, each on its best node or one near enough, and nominate it.

        The nodes that this plan has `used` so far are preferred.
        """
        full: set[tuple[object, ...]] = set()
        for pod in pods:
            await turns.spend(_PLACE_STEPS)
            requested = self._request_of(pod)
            if requested is None or requested.pod_request.request.key in full:
                continue
            best = await self._best(pod, requested, names, used)
            if best is None:
                full.add(requested.pod_request.request.key)
                continue
            known = self._cache.pods.get(pod.uid)
            if known is not None and waits(known) and self._is_undecided(known):
                self._pending.hold(Hold.of(pod, requested, best), planned=True)
                used.add(best.node)
                self._nominations.add(self._pending.record(pod.uid), best.node)
                PLANNED.inc()

    def _request_of(self, pod: PodRecord) -> PendingRequest | None:
        """Return the request of a pod that can be planned, else None."""
        try:
            return self._pending.request_of(pod)
        except BadAnnotation:  # its own filter call names the fault
            return None

    async def _take_over(
        self, pod: PodRecord, request: Request, names: Collection[NodeName]
    ) -> Candidate | None:
        """Find a place for a pod in the cores of pods that are planned after it, and drop their plans."""
        found: list[Candidate] = []
        turns = Turns()
        for node in sorted(self._pending.planned_nodes.intersection(names)):
            await turns.spend(_PLACE_STEPS)
            candidate = self._without_plans(pod, request, node)
            if candidate is not None:
                found.append(candidate)
        best = best_candidate(found, self._strategy)
        # Others may have had their turn meanwhile.
        best = self._without_plans(pod, request, best.node) if best is not None else None
        if best is not None:
            self._make_way(pod, best)
        return best

    def _without_plans(self, pod: PodRecord, request: Request, node: NodeName) -> Candidate | None:
        snapshot = self._cache.snapshot(node, self._before(pod, node))
        if not isinstance(snapshot, NodeSnapshot):
            return None
        return candidate_on(node, snapshot.machine.topology, snapshot.free, request)

    def _make_way(self, pod: PodRecord, chosen: Candidate) -> None:
        """Drop the plans for a node that do not fit beside a pod any more."""
        taken = claim_of(pod.uid, chosen.placement)
        kept = [*self._before(pod, chosen.node), taken]
        before = {claim.uid for claim in kept}
        for claim in [claim for claim in self._pending.held_on(chosen.node) if claim.uid not in before]:
            snapshot = self._cache.snapshot(chosen.node, kept)
            if isinstance(snapshot, NodeSnapshot) and snapshot.free.can_give(claim):
                kept.append(claim)
            elif claim.cpus & ~taken.cpus:
                self._pending.leave(claim.uid)
            else:
                self._pending.end_hold(claim.uid)

    def _before(self, pod: PodRecord, node: NodeName) -> list[Claim]:
        """Return the holds on a node that come before a pod: ordinary ones, and those of higher priority."""
        after = {uid for uid in self._pending.planned_on(node) if self._priority(uid) <= pod.priority}
        return [claim for claim in self._pending.held_on(node, but=pod.uid) if claim.uid not in after]

    def _priority(self, uid: PodUid) -> int:
        pod = self._cache.pods.get(uid)
        return pod.priority if pod is not None else 0


def is_about_nominated_node(pod: PodRecord, names: Collection[NodeName]) -> bool:
    """Whether kube-scheduler asks about the pod's nominated node alone.

    It does so before it checks other nodes, and again if it accepts no other node.
    """
    return len(names) == 1 and pod.nominated in names
