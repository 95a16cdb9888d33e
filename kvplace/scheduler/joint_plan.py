"""Planning pods together that wait together.

When kube-scheduler asks about one pod of a rollout, the others usually wait already. They are planned along
with it, over the same nodes: each gets a planned hold, and later calls are answered from it. The first bind
on a node then claims for all that are planned there, in one write of its ledger.

A plan is no promise. The pod that is asked about now comes before those that are only planned: where it fits
nowhere else, it takes the cores of pods of its own or lower priority, which are then planned anew.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, groupby, islice, takewhile

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.node_choice import Candidate, Fit, Strategy, best_candidate
from kvplace.core.cluster.rearranging import Arrangement, better_arrangements
from kvplace.core.errors import BadAnnotation
from kvplace.core.free import Free
from kvplace.core.ledger import Claim, claim_of
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeSnapshot, Unusable
from kvplace.scheduler.explanation import ARRANGED, TAKEN, explain_choice, explain_placement
from kvplace.scheduler.fit_table import FitTable
from kvplace.scheduler.gathering import Gathering
from kvplace.scheduler.holds import Holds
from kvplace.scheduler.metrics import PLANNED
from kvplace.scheduler.nominations import Nominations
from kvplace.scheduler.offered_nodes import OfferedNodes
from kvplace.scheduler.pod_requests import AskingPod, PodRequests
from kvplace.scheduler.waiting_pods import WaitingPods, waits

TOGETHER = 64
"""Pods that are planned together at most.

kube-scheduler is through with nominated pods in no time and binds all of them at once: with 256, a busy API
server did not bind the last ones before their binds timed out.
"""
_NODES_REARRANGED = 12
_PODS_REARRANGED = 64
"""Nodes and pods of a plan that are considered when some of its pods find no place."""
_AT_ONCE = 3
"""Pods or machines that are looked at before others get their turn on the event loop."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A pod of a plan, and where it goes; None if it fits nowhere."""

    pod: PodRecord
    asking: AskingPod
    choice: Candidate | None

    @property
    def request(self) -> Request:
        return self.asking.pod_request.request


class JointPlan:
    """Chooses nodes and holds their cores, for one pod or for all that wait beside it."""

    def __init__(
        self,
        cache: NodeCache,
        requests: PodRequests,
        fits: FitTable,
        holds: Holds,
        nominations: Nominations,
        strategy: Strategy,
    ) -> None:
        self._cache = cache
        self._requests = requests
        self._fits = fits
        self._holds = holds
        self._nominations = nominations
        self._strategy = strategy
        self._waiting = WaitingPods(cache.pods)
        self._gathering = Gathering(self._waiting)
        self._offered = OfferedNodes()

    def node_of(self, pod: PodRecord, names: Collection[NodeName]) -> NodeName | None:
        """Return the node for which a pod is planned, if it still can go there.

        A node that kube-scheduler does not offer, although it was asked about all, is one that it has
        rejected for a reason of its own; it will reject it for the others that are planned there, too.
        """
        node = self._holds.planned_node(pod.uid)
        if node is None:
            return None
        claim = self._holds.of_pod(pod.uid, node)
        if node not in names:
            if not is_about_nominated_node(pod, names):
                for planned in self._holds.planned_on(node):
                    self._holds.leave(planned)
            return None
        snapshot = self._cache.snapshot(node, self._holds.on_node(node, but=pod.uid))
        if claim is None or isinstance(snapshot, Unusable) or not snapshot.free.can_give(claim):
            return None
        self._holds.asked(pod.uid)
        return node

    async def place(self, pod: PodRecord, asking: AskingPod, names: Collection[NodeName]) -> NodeName | None:
        """Hold cores for a pod and for those that wait beside it; return where the pod itself goes.

        1. Those of higher priority come before it, as they do with kube-scheduler.
        2. The pod itself; where it fits nowhere, it takes the cores of pods that are only planned.
        3. The others, in kube-scheduler's order.
        4. Pods of one priority of which some find no place are arranged in another way, if that helps.

        Where nodes are nominated, it waits for some more pods before, and for the nominations afterwards:
        kube-scheduler, which tries one pod after the other, would otherwise look at all nodes for the next.
        """
        names = frozenset(names)
        self._remember_offer(pod, names)
        await self._gather(pod, names)
        beside = self._beside(pod) if not is_about_nominated_node(pod, names) else []
        await self._plan(takewhile(lambda one: one.priority > pod.priority, beside), names)
        best = await self._best(pod, asking, names)
        if best is None:
            best = await self._take_over(pod, asking.pod_request.request, names)
            if best is not None and asking.pod_request.explain:
                self._requests.explain(pod.uid, explain_placement(best.node, best.placement, TAKEN))
        if best is not None:
            self.hold(pod, asking, best.node, best.placement)
        rest = dropwhile(lambda one: one.priority > pod.priority, beside)
        await self._plan(rest, names, _Planned(pod, asking, best))
        await self._nominations.written()
        return self._holds.node_of(pod.uid)

    async def plan_ahead(self, pod: PodRecord, names: Collection[NodeName]) -> None:
        """Plan the pods behind one that knows its node already, so that kube-scheduler finds them nominated.

        Called before kube-scheduler gets its answer. Where no other nominated pod is left to it, those that
        follow are planned over the nodes that it has offered a moment ago for a pod of the same shape.
        """
        known = self._cache.pods.get(pod.uid)
        if known is None or not known.shape or not self._nominations.pay:
            return
        self._remember_offer(pod, frozenset(names))
        offered = self._offered.of_shape(known.shape)
        if offered is not None and not self._nominations.ahead:
            await self._gathering.gather(known.shape, TOGETHER)
            await self._plan(self._others_of(known), offered)
        await self._nominations.written()

    def hold(
        self,
        pod: PodRecord,
        asking: AskingPod,
        node: NodeName,
        placement: Placement,
        *,
        planned: bool = False,
    ) -> None:
        """Hold what a pod would claim on the node that was chosen for it."""
        claim = claim_of(
            pod.uid,
            placement,
            namespace=pod.namespace,
            pod=pod.name,
            vmi=asking.pod_request.vmi_name,
        )
        self._holds.hold(node, claim, planned=planned)

    async def _best(self, pod: PodRecord, asking: AskingPod, names: frozenset[NodeName]) -> Candidate | None:
        request = asking.pod_request.request
        if not asking.pod_request.explain:
            return await self._fits.best(names, request)
        best, next_best = await self._fits.two_best(names, request)
        if best is not None:
            self._requests.explain(pod.uid, explain_choice(best, next_best, self._strategy))
        return best

    async def _gather(self, pod: PodRecord, names: Collection[NodeName]) -> None:
        known = self._cache.pods.get(pod.uid)
        if self._nominations.pay and known is not None and waits(known) and len(names) > 1:
            await self._gathering.gather(known.shape, TOGETHER)

    def _beside(self, pod: PodRecord) -> list[PodRecord]:
        """Return the pods to be planned along with one, in kube-scheduler's order."""
        known = self._cache.pods.get(pod.uid)
        return self._others_of(known) if known is not None and waits(known) else []

    def _others_of(self, pod: PodRecord) -> list[PodRecord]:
        """Return pods of a pod's shape that wait and have no node yet, in kube-scheduler's order."""
        others = (
            one for one in self._waiting.of_shape(pod.shape) if one.uid != pod.uid and self._is_undecided(one)
        )
        return list(islice(others, TOGETHER - 1))

    def _remember_offer(self, pod: PodRecord, names: frozenset[NodeName]) -> None:
        known = self._cache.pods.get(pod.uid)
        if self._nominations.pay and known is not None and not is_about_nominated_node(pod, names):
            self._offered.remember(known.shape, names)

    def _is_undecided(self, pod: PodRecord) -> bool:
        return not self._holds.has(pod.uid) and not self._cache.ledgers.nodes_claimed_by(pod.uid)

    async def _plan(
        self, pods: Iterable[PodRecord], names: frozenset[NodeName], first: _Planned | None = None
    ) -> None:
        """Plan pods, priority by priority; `first` is planned already and belongs to the first of them."""
        for priority, group in groupby(pods, lambda pod: pod.priority):
            planned = [first] if first is not None and first.pod.priority == priority else []
            await self._plan_in_turn(group, names, planned)
            if any(one.choice is None for one in planned):
                await self._rearrange(planned, names, first)
            for one in planned:
                node = self._holds.planned_node(one.pod.uid)
                if node is not None:
                    PLANNED.inc()
                    self._nominations.add(one.pod.uid, node)

    async def _plan_in_turn(
        self, pods: Iterable[PodRecord], names: frozenset[NodeName], planned: list[_Planned]
    ) -> None:
        """Hold cores for pods, each where it fits best, and append them to `planned`."""
        full: set[tuple[object, ...]] = set()
        for number, pod in enumerate(pods):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            asking = self._asking(pod)
            if asking is None:
                continue
            request = asking.pod_request.request
            best = await self._best(pod, asking, names) if request.key not in full else None
            if best is None:
                full.add(request.key)
            known = self._cache.pods.get(pod.uid)
            if known is not None and waits(known) and self._is_undecided(known):
                planned.append(_Planned(pod, asking, best))
                if best is not None:
                    self.hold(pod, asking, best.node, best.placement, planned=True)

    async def _rearrange(
        self, planned: Sequence[_Planned], names: frozenset[NodeName], first: _Planned | None
    ) -> None:
        """Look for a way in which more of the pods find a place; the pod asked about keeps one.

        Nothing is changed if anything about the nodes or the pods has changed before the way is found.
        """
        pods = [one for one in planned if one.request.owns_cpus]
        nodes = await self._nodes_to_rearrange(pods, names)
        if not nodes:
            return
        left = [one for one in pods if one.choice is None][:_PODS_REARRANGED]
        pods = left + [one for one in pods if one.choice is not None and one.choice.node in nodes]
        known = {
            number: (one.choice.node, one.choice.placement)
            for number, one in enumerate(pods)
            if one.choice is not None
        }
        without = {pods[number].pod.uid for number in known}
        before = self._free_without(nodes, without)
        number_of_first = next((number for number, one in enumerate(pods) if one is first), None)
        found: Arrangement | None = None
        for better in better_arrangements(
            before, [one.request for one in pods], known, first=number_of_first
        ):
            found = better or found
            await asyncio.sleep(0)
        is_current = all(self._is_as_planned(one, is_first=one is first) for one in pods)
        if found is None or not is_current or self._free_without(nodes, without) != before:
            return
        for uid in without:
            self._holds.drop(uid)
        for number, (node, placement) in found.items():
            one = pods[number]
            self.hold(one.pod, one.asking, node, placement, planned=one is not first)
            if one.asking.pod_request.explain:
                self._requests.explain(one.pod.uid, explain_placement(node, placement, ARRANGED))

    def _is_as_planned(self, one: _Planned, *, is_first: bool) -> bool:
        """Whether a pod still waits, only planned for its node, or for none; the first one is asked about."""
        uid = one.pod.uid
        known = self._cache.pods.get(uid)
        if known is None or not waits(known) or self._cache.ledgers.nodes_claimed_by(uid):
            return False
        if one.choice is None:
            return not self._holds.has(uid)
        return one.choice.node == (self._holds.node_of(uid) if is_first else self._holds.planned_node(uid))

    async def _nodes_to_rearrange(
        self, pods: Sequence[_Planned], names: frozenset[NodeName]
    ) -> list[NodeName]:
        """Return the nodes on which pods without a place would fit alone, and some where others could go."""
        chosen = {one.choice.node for one in pods if one.choice is not None}
        uids = {one.pod.uid for one in pods}
        left = {one.request.key: one.request for one in pods if one.choice is None}
        contested: list[NodeName] = []
        for number, node in enumerate(sorted(chosen)):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            for topology, free in self._free_without([node], uids).values():
                if any(try_place(topology, free, request) is not None for request in left.values()):
                    contested.append(node)
        if not contested:
            return []
        others: list[NodeName] = []
        for request in {one.request.key: one.request for one in pods if one.choice is not None}.values():
            spare = await self._fits.best(names, request)
            if spare is not None:
                others.append(spare.node)
        return self._a_few([*contested, *others, *sorted(chosen)], pods)

    def _a_few(self, nodes: Iterable[NodeName], pods: Sequence[_Planned]) -> list[NodeName]:
        """Return the first nodes of some, as many as are rearranged at once."""
        planned = Counter(one.choice.node for one in pods if one.choice is not None)
        few: list[NodeName] = []
        for node in dict.fromkeys(nodes):
            within = sum(planned[one] for one in [*few, node]) <= _PODS_REARRANGED
            if len(few) < _NODES_REARRANGED and within:
                few.append(node)
        return few

    def _free_without(
        self, nodes: Iterable[NodeName], uids: Collection[PodUid]
    ) -> dict[NodeName, tuple[Topology, Free]]:
        """Return what is free on nodes without the holds of some pods."""
        found: dict[NodeName, tuple[Topology, Free]] = {}
        for node in nodes:
            kept = [claim for claim in self._holds.on_node(node) if claim.uid not in uids]
            snapshot = self._cache.snapshot(node, kept)
            if isinstance(snapshot, NodeSnapshot):
                found[node] = (snapshot.machine.topology, snapshot.free)
        return found

    def _asking(self, pod: PodRecord) -> AskingPod | None:
        """Return what a pod asks for, if it can be planned."""
        try:
            return self._requests.read(pod)
        except BadAnnotation:  # its own filter call says what is wrong
            return None

    async def _take_over(
        self, pod: PodRecord, request: Request, names: frozenset[NodeName]
    ) -> Candidate | None:
        """Find a place for a pod in the cores of pods that are planned after it; drops those of them."""
        found: list[Candidate] = []
        for number, node in enumerate(sorted(self._holds.planned_nodes & names)):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
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
        return Candidate(node, Fit(topology, placement, snapshot.free, request.vcpus))

    def _make_way(self, pod: PodRecord, chosen: Candidate) -> None:
        """Drop the plans for a node that do not fit beside a pod any more."""
        taken = claim_of(pod.uid, chosen.placement)
        kept = [*self._before(pod, chosen.node), taken]
        before = {claim.uid for claim in kept}
        for claim in [claim for claim in self._holds.on_node(chosen.node) if claim.uid not in before]:
            snapshot = self._cache.snapshot(chosen.node, kept)
            if isinstance(snapshot, NodeSnapshot) and snapshot.free.can_give(claim):
                kept.append(claim)
            elif claim.cpus & ~taken.cpus:
                self._holds.leave(claim.uid)
            else:
                self._holds.drop(claim.uid)

    def _before(self, pod: PodRecord, node: NodeName) -> list[Claim]:
        """Return the holds on a node that come before a pod: those asked about, and of higher priority."""
        after = {uid for uid in self._holds.planned_on(node) if self._priority(uid) <= pod.priority}
        return [claim for claim in self._holds.on_node(node, but=pod.uid) if claim.uid not in after]

    def _priority(self, uid: PodUid) -> int:
        pod = self._cache.pods.get(uid)
        return pod.priority if pod is not None else 0


def is_about_nominated_node(pod: PodRecord, names: Collection[NodeName]) -> bool:
    """Whether kube-scheduler asks about the pod's nominated node alone.

    So it does before it looks at any other, and again where it accepts no other.
    """
    return len(names) == 1 and pod.nominated in names
