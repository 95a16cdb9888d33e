"""Joint plans of waiting pods, in clusters so large that their nodes are nominated.

When kube-scheduler asks about one pod of a rollout, the others usually wait already. They are planned along
with it, over the same nodes: each gets a planned hold, and later calls are answered from it. The first bind
on a node then claims for all that are planned there, in one write of its ledger.

A plan is not a promise. The pod of the present call comes before planned pods: where it
fits nowhere else, it takes the cores of pods of its own or lower priority, which are then planned anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import dropwhile, islice, takewhile

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.node_choice import Candidate, Fit, Strategy, best_candidate, why
from kvplace.core.errors import BadAnnotation
from kvplace.core.ledger import Claim, claim_of
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.concurrency import Turns
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeSnapshot, Unusable
from kvplace.scheduler.fit_table import FitTable
from kvplace.scheduler.metrics import PLANNED
from kvplace.scheduler.nominations import Nominations
from kvplace.scheduler.pending_pods import AskingPod, Hold, PendingPods, waits

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


class Gathering:
    """Detects a stream of pods, and lets its first pod wait for more.

    The first pod of a plan costs kube-scheduler a check of all nodes, and each nominated pod a check of one
    node. VMs of a rollout arrive some dozens a second.
    """

    def __init__(self, pending: PendingPods) -> None:
        self._pending = pending
        self._last = float("-inf")
        self._arrived = 0

    async def gather(self, shape: bytes, enough: int) -> None:
        """Wait a moment, during a stream of pods, until `enough` pods of a shape wait.

        If no pod has come since the last call, all pods of a rollout are there already.
        """
        loop = asyncio.get_running_loop()
        if self._pending.arrived > self._arrived and loop.time() - self._last < STREAM_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._pending.until_waiting(shape, enough, quiet_s=QUIET_S)
        self._last = loop.time()
        self._arrived = self._pending.arrived


class OfferedNodes:
    """The nodes that kube-scheduler has offered last, by the shape of the pod it asked about.

    Its plugins accept the same nodes for pods of one shape, unless the pods request other amounts or a node
    has changed. Then kube-scheduler refuses the nominated node, examines all nodes, and so offers new ones.
    """

    def __init__(self) -> None:
        self._offers: OrderedDict[bytes, tuple[float, frozenset[NodeName]]] = OrderedDict()

    def remember(self, shape: bytes, names: frozenset[NodeName]) -> None:
        """Keep the nodes that kube-scheduler offers now."""
        self._offers[shape] = (asyncio.get_running_loop().time(), names)
        self._offers.move_to_end(shape)
        while len(self._offers) > _SHAPES:
            self._offers.popitem(last=False)

    def of_shape(self, shape: bytes) -> frozenset[NodeName] | None:
        """Return the recent offer for a shape, if there is one."""
        offered_at, names = self._offers.get(shape, (float("-inf"), frozenset[NodeName]()))
        return names if asyncio.get_running_loop().time() - offered_at < OFFER_S else None


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
        self._gathering = Gathering(pending)
        self._offered = OfferedNodes()

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

    async def place(self, pod: PodRecord, asking: AskingPod, names: Collection[NodeName]) -> NodeName | None:
        """Hold cores for a pod and for the pods that wait beside it; return the node of the pod itself.

        1. Pods of higher priority come before it, as with kube-scheduler.
        2. The pod itself comes next. If it fits nowhere, it takes the cores of pods that are only planned.
        3. The other pods follow, in kube-scheduler's order.

        If nodes are nominated, it waits for more pods first, and for the nominations at the end. Otherwise
        kube-scheduler, which tries one pod after the other, would check all nodes for the next pod.
        """
        if not self._nominations.pay:
            best = await self._place(pod, asking, names)
            return best.node if best is not None else None
        names = self._fits.set_of(names)
        self._remember_offer(pod, names)
        await self._gather(pod, names)
        beside = self._beside(pod) if not is_about_nominated_node(pod, names) else []
        turns = Turns()
        await self._plan(takewhile(lambda one: one.priority > pod.priority, beside), names, turns)
        await turns.spend(_PLACE_STEPS)
        await self._place(pod, asking, names)
        rest = dropwhile(lambda one: one.priority > pod.priority, beside)
        await self._plan(rest, names, turns)
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
        offered = self._offered.of_shape(known.shape)
        if offered is not None and not self._pending.is_nominated_pod_ahead:
            await self._gathering.gather(known.shape, TOGETHER)
            await self._plan(self._others_of(known), offered, Turns())
        await self._nominations.written()

    async def _place(
        self, pod: PodRecord, asking: AskingPod, names: Collection[NodeName]
    ) -> Candidate | None:
        """Hold cores for one pod; it takes the cores of planned pods if no others are left."""
        best = await self._best(pod, asking, names)
        if best is None:
            best = await self._take_over(pod, asking.pod_request.request, names)
            if best is not None and asking.pod_request.explain:
                self._pending.get(pod.uid).explanation = explain_placement(best.node, best.placement, TAKEN)
        if best is not None:
            self._pending.hold(Hold.of(pod, asking, best))
        return best

    async def _best(self, pod: PodRecord, asking: AskingPod, names: Collection[NodeName]) -> Candidate | None:
        request = asking.pod_request.request
        if not asking.pod_request.explain:
            return await self._fits.best(names, request)
        best, next_best = await self._fits.two_best(names, request)
        if best is not None:
            self._pending.get(pod.uid).explanation = explain_choice(best, next_best, self._strategy)
        return best

    async def _gather(self, pod: PodRecord, names: Collection[NodeName]) -> None:
        known = self._cache.pods.get(pod.uid)
        if self._nominations.pay and known is not None and waits(known) and len(names) > 1:
            await self._gathering.gather(known.shape, TOGETHER)

    def _beside(self, pod: PodRecord) -> list[PodRecord]:
        """Return the pods to be planned along with one, in kube-scheduler's order."""
        known = self._cache.pods.get(pod.uid)
        if known is None or not waits(known) or not self._nominations.pay:
            return []
        return self._others_of(known)

    def _others_of(self, pod: PodRecord) -> list[PodRecord]:
        """Return pods of a pod's shape that wait and have no node yet, in kube-scheduler's order."""
        others = (
            one for one in self._pending.of_shape(pod.shape) if one.uid != pod.uid and self._is_undecided(one)
        )
        return list(islice(others, TOGETHER - 1))

    def _remember_offer(self, pod: PodRecord, names: frozenset[NodeName]) -> None:
        known = self._cache.pods.get(pod.uid)
        if self._nominations.pay and known is not None and not is_about_nominated_node(pod, names):
            self._offered.remember(known.shape, names)

    def _is_undecided(self, pod: PodRecord) -> bool:
        return self._pending.hold_of(pod.uid) is None and not self._cache.ledgers.nodes_claimed_by(pod.uid)

    async def _plan(self, pods: Iterable[PodRecord], names: frozenset[NodeName], turns: Turns) -> None:
        """Hold cores for pods in their order, each where it fits best, and nominate its node."""
        full: set[tuple[object, ...]] = set()
        for pod in pods:
            await turns.spend(_PLACE_STEPS)
            asking = self._asking(pod)
            if asking is None or asking.pod_request.request.key in full:
                continue
            best = await self._best(pod, asking, names)
            if best is None:
                full.add(asking.pod_request.request.key)
                continue
            known = self._cache.pods.get(pod.uid)
            if known is not None and waits(known) and self._is_undecided(known):
                self._pending.hold(Hold.of(pod, asking, best), planned=True)
                self._nominations.add(pod.uid, best.node)
                PLANNED.inc()

    def _asking(self, pod: PodRecord) -> AskingPod | None:
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
        topology = snapshot.machine.topology
        placement = try_place(topology, snapshot.free, request)
        if placement is None:
            return None
        return Candidate(node, Fit.of(topology, snapshot.free, request, placement))

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
