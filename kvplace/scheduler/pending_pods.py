"""The pods that are not bound yet, one record each, from its first use until they are bound or gone.

A record has everything that this process knows of a pod: its request, the attempts of kube-scheduler, the
last refusal, the reasons for its node, its hold, and its nomination. UID and attempt together name one
decision in the log.

A hold is the offer of a node to a pod: the cores that Filter has chosen there. Holds keep pods that are
scheduled at the same time from choosing the same cores; only the claim in the ledger counts. A hold ends with
the bind of its pod, with the pod, or after a while. Where the end leaves the cores without an owner,
subscribers are called: another pod may have been refused because of them. The hold of a pod that was planned
together with another one is planned until kube-scheduler asks about this pod.

One rule forgets records, and their holds: when the watch shows that a pod is bound or gone. If it showed that
before the first use, no event would remove the record. So each new record examines the two oldest.

Everything else here is an index: holds by node, as each decision about a node needs them, and holds by age.
`waiting_pods.py` has the pods without a first try. Tasks that work for a pod may outlive its record, until
they have completed or undone their work: `Binder` and `RoomMaker` know theirs.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Self

from kvplace.core.annotations import check_agreement
from kvplace.core.cluster.node_choice import Candidate
from kvplace.core.errors import Refused
from kvplace.core.ledger import Claim, claim_of
from kvplace.core.placement import Placement
from kvplace.core.request_json import PodRequest, read_pod_request
from kvplace.core.scalars import NodeName, PodUid, ResourceName
from kvplace.kube.events import ObjectReference, vmi_reference
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeSnapshot, Unusable
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.extender_protocol import BindingArgs
from kvplace.scheduler.waiting_pods import WaitingPods

_SAME_ATTEMPT_S = 1.0
"""Between two questions of one attempt; the next attempt comes a second later, or after a change."""
_NEWEST = 256
"""Records that are not examined: the watch may not have shown their pods yet."""
_EXAMINED = 2


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """The request of a pod, and its VMI."""

    pod_request: PodRequest
    vmi: ObjectReference | None
    """None for a plain pod."""
    migration: str = ""
    """The live migration that the pod is the target of; empty for another pod."""
    extended: frozenset[ResourceName] = frozenset()
    """Extended resources that kube-scheduler allocates as devices (DRA); `pod_request` is without them."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The offer of a node to a pod."""

    node: NodeName
    claim: Claim
    """The claim that its bind would store."""
    placement: Placement
    """The placement of the claim on the machine with this `fingerprint`."""
    fingerprint: str

    @classmethod
    def of(cls, pod: PodRecord, requested: PendingRequest, chosen: Candidate) -> Self:
        """Offer a pod the node that was chosen for it."""
        placement, vmi = chosen.placement, requested.pod_request.vmi_name
        claim = claim_of(pod.uid, placement, namespace=pod.namespace, pod=pod.name, vmi=vmi)
        return cls(chosen.node, claim, placement, chosen.fit.topology.fingerprint)


@dataclass(slots=True)
class PendingPod:
    """The state of a pod that is not bound yet."""

    uid: PodUid
    requested: PendingRequest | None = None
    """None until the request is read."""
    attempts: int = 0
    """The number of Filter calls for it."""
    since: float | None = None
    """When Filter was asked first; None also after the placement was counted."""
    refusal: str = ""
    """The last refusal; empty if the pod was not refused."""
    explanation: str = ""
    """The reasons for its node, for `kvplace.io/explain`."""
    nominated_refused_at: float = float("-inf")
    curable: tuple[NodeName, ...] = ()
    """Nodes where only cores were missing at `curable_at`: preemption may help there."""
    curable_at: float = float("-inf")
    refused_binds: dict[NodeName, tuple[str, str]] = field(default_factory=dict)
    """Nodes that Bind has refused to a pod with devices: version of the ledger, and refusal."""
    leaving: dict[PodUid, float] = field(default_factory=dict)
    """The pods that end anyway and that it waits for, each with the start of the wait."""
    hold: Hold | None = None
    is_planned: bool = False
    """Whether kube-scheduler has not asked about the pod since its hold began."""
    held_until: float = 0.0
    given_up: NodeName | None = None
    """The node of a hold that the pod has given up to choose again, until Filter has answered."""
    nomination: NodeName | None = None
    """The node that is nominated for it, or soon will be; None once kube-scheduler has asked about it."""
    stored_along: tuple[Claim, float] | None = None
    """Its claim that was stored along with another one, and when."""
    no_room_before: float = float("-inf")
    """Until when no room is made for it again."""


class PendingPods:
    """Records by pod UID, and the indexes."""

    def __init__(
        self,
        cluster: SchedulerClient,
        cache: NodeCache,
        *,
        hold_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`clock` times attempts and holds."""
        self._cluster = cluster
        self._cache = cache
        self._pods = cache.pods
        self._hold_seconds = hold_seconds
        self._clock = clock
        self._records: OrderedDict[PodUid, PendingPod] = OrderedDict()
        self._holding: dict[PodUid, PendingPod] = {}
        """The records with a hold; the oldest hold first."""
        self._on_node: dict[NodeName, dict[PodUid, Claim]] = {}
        self._left: list[Callable[[NodeName], None]] = []
        self._changed: list[Callable[[NodeName], None]] = []
        self.waiting = WaitingPods()
        cache.pods.subscribe(self._pod_seen)

    # Records.

    def record(self, uid: PodUid) -> PendingPod:
        """Return the record of a pod."""
        found = self._records.get(uid)
        if found is None:
            found = self._records[uid] = PendingPod(uid)
            self._examine_oldest()
        return found

    def begin(self, uid: PodUid) -> PendingPod:
        """Count a question of Filter, and return the record of the pod.

        The pod needs no nomination any more. It gives up its hold, unless this is planned.
        """
        self.drop_expired()
        pending = self.record(uid)
        pending.attempts += 1
        if pending.attempts == 1:
            pending.since = self._clock()
        pending.nomination = None
        if not pending.is_planned:
            self.give_up(pending)
        return pending

    def answered(self, pending: PendingPod, refusal: str) -> bool:
        """Record the refusal, or "" for an offer; returns whether the refusal differs from the last one.

        The cores of a hold that the pod gave up and did not take again are left to other pods.
        """
        node, pending.given_up = pending.given_up, None
        if node is not None and not self._has_taken(pending.uid, node):
            self.left(node)
        is_news, pending.refusal = refusal != pending.refusal, refusal
        return is_news

    def _has_taken(self, uid: PodUid, node: NodeName) -> bool:
        """Whether a pod has a hold or a claim on a node."""
        return node == self.node_of(uid) or node in self._cache.ledgers.nodes_claimed_by(uid)

    def request_of(self, pod: PodRecord) -> PendingRequest | None:
        """Return the request of a pod; None if it has none.

        Raises BadAnnotation if the request cannot be read or contradicts itself.
        """
        if not pod.request:
            return None
        pending = self.record(pod.uid)
        if pending.requested is None:
            pending.requested = self._read_request(pod)
        return pending.requested

    async def of_binding(self, args: BindingArgs) -> PendingRequest:
        """Return the request of a pod that is to be bound; raises Refused if the pod is gone or has none."""
        requested = self.record(args.uid).requested
        if requested is not None:
            return requested
        pod = self._pods.get(args.uid) or await self._cluster.read_pod(args.namespace, args.name)
        if pod is None or pod.uid != args.uid:
            raise Refused(f"pod {args.namespace}/{args.name} with UID {args.uid} is gone")
        if not pod.request:
            raise Refused(f"pod {args.namespace}/{args.name} carries no kvplace.io/request")
        return self._read_request(pod)

    def nominated_refused_twice(self, pending: PendingPod) -> bool:
        """Record a refusal of the nominated node alone; returns whether one was recorded a moment ago, too.

        kube-scheduler asks about this node first, and then at once about all nodes that it accepts. The
        second question equals the first if it accepts no other node.
        """
        now = self._clock()
        is_second = now - pending.nominated_refused_at < _SAME_ATTEMPT_S
        pending.nominated_refused_at = float("-inf") if is_second else now
        return is_second

    def _examine_oldest(self) -> None:
        if len(self._records) > _NEWEST:
            for uid in list(islice(self._records, _EXAMINED)):
                pod = self._pods.get(uid)
                if uid in self._holding or (pod is not None and not pod.node):
                    self._records.move_to_end(uid)
                else:
                    self._forget(uid)

    def _forget(self, uid: PodUid, *, bound_to: str = "") -> None:
        """Drop a record, and end its hold; the cores are left unless the pod is bound with them."""
        hold = self.hold_of(uid)
        if hold is not None and hold.node == bound_to:
            self.end_hold(uid)
        else:
            self.leave(uid)
        self._records.pop(uid, None)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        self.waiting.pod_seen(before, after)
        pod = after or before
        if pod is not None and (after is None or after.node):
            self._forget(pod.uid, bound_to=after.node if after is not None else "")

    def _read_request(self, pod: PodRecord) -> PendingRequest:
        pod_request = read_pod_request(pod.request)
        request = pod_request.request
        # The admission of another release may have accepted options that exclude each other.
        check_agreement(request.options, {})
        vmi = vmi_reference(pod.namespace, pod.vmi, pod.vmi_uid) if pod.vmi else None
        extended = self._cache.dra.extended_resources.intersection(request.devices)
        if extended:
            counted = {name: count for name, count in request.devices.items() if name not in extended}
            pod_request = replace(pod_request, request=replace(request, devices=counted))
        return PendingRequest(pod_request, vmi, pod.migration, extended)

    def needs_room(self, uid: PodUid) -> bool:
        """Return whether a pod still waits and nothing is held for it."""
        pod = self._pods.get(uid)
        return pod is not None and not pod.node and not pod.deleting and uid not in self._holding

    # Holds.

    @property
    def number_held(self) -> int:
        """The number of pods with a hold, expired holds included."""
        return len(self._holding)

    def subscribe(self, left: Callable[[NodeName], None]) -> None:
        """Call `left` with the node whenever cores are no longer held and no claim has taken them."""
        self._left.append(left)

    def subscribe_changes(self, changed: Callable[[NodeName], None]) -> None:
        """Call `changed` with the node whenever its holds change."""
        self._changed.append(changed)

    async def run(self) -> None:
        """End holds as soon as their time is over, until cancelled."""
        while True:
            oldest = next(iter(self._holding.values()), None)
            # A hold that begins during the pause ends after it.
            await asyncio.sleep(self._hold_seconds if oldest is None else oldest.held_until - self._clock())
            self.drop_expired()

    def hold(self, hold: Hold, *, planned: bool = False) -> None:
        """Begin a hold; it replaces an earlier hold of the pod."""
        uid = hold.claim.uid
        self.end_hold(uid)
        pending = self._holding[uid] = self.record(uid)
        pending.hold, pending.is_planned = hold, planned
        pending.held_until = self._clock() + self._hold_seconds
        self._on_node.setdefault(hold.node, {})[uid] = hold.claim
        self._node_changed(hold.node)

    def end_hold(self, uid: PodUid) -> None:
        """End the hold of a pod, if it has one; its claim or other holds take the cores."""
        pending = self._holding.pop(uid, None)
        if pending is None or pending.hold is None:
            return
        node, pending.hold, pending.is_planned = pending.hold.node, None, False
        held = self._on_node[node]
        del held[uid]
        if not held:
            del self._on_node[node]
        self._node_changed(node)

    def claim_stored(self, uid: PodUid, node: NodeName) -> None:
        """End the hold of a pod after its claim is stored, and the other holds with claims there."""
        self.record(uid).stored_along = None  # the next attempt cannot know whether the binding arrives
        stored = self._cache.ledger(node).claims
        for held in [uid, *self._on_node.get(node, ())]:
            if held == uid or held in stored:
                self.end_hold(held)

    def give_up(self, pending: PendingPod) -> None:
        """End the hold of a pod that chooses again; `answered` leaves its cores to other pods."""
        if pending.hold is not None:
            pending.given_up = pending.hold.node
            self.end_hold(pending.uid)

    def leave(self, uid: PodUid) -> None:
        """End the hold of a pod, if it has one, and leave its cores to other pods."""
        hold = self.hold_of(uid)
        self.end_hold(uid)
        if hold is not None:
            self.left(hold.node)

    def left(self, node: NodeName) -> None:
        """Call the subscribers: cores of a node are no longer held."""
        for left in self._left:
            left(node)

    def _node_changed(self, node: NodeName) -> None:
        for changed in self._changed:
            changed(node)

    def drop_expired(self) -> None:
        """End the expired holds; the oldest come first."""
        now = self._clock()
        for uid in list(takewhile(lambda uid: self._holding[uid].held_until <= now, self._holding)):
            self.leave(uid)

    def hold_of(self, uid: PodUid, node: NodeName | None = None) -> Hold | None:
        """Return the hold of a pod; with a node only a hold there."""
        pending = self._holding.get(uid)
        hold = pending.hold if pending is not None else None
        return hold if hold is not None and node in (None, hold.node) else None

    def node_of(self, uid: PodUid) -> NodeName | None:
        """Return the node where a pod has a hold."""
        hold = self.hold_of(uid)
        return hold.node if hold is not None else None

    def held_on(self, node: NodeName, *, but: PodUid | None = None) -> tuple[Claim, ...]:
        """Return the holds of a node, without the one of the pod `but`."""
        return tuple(claim for uid, claim in self._on_node.get(node, {}).items() if uid != but)

    def snapshot(self, node: NodeName, *, but: PodUid | None = None) -> NodeSnapshot | Unusable:
        """Return the node's machine and its free resources beside all holds but the one of the pod `but`."""
        return self._cache.snapshot(node, self.held_on(node, but=but))

    def planned_node(self, uid: PodUid) -> NodeName | None:
        """Return the node that a pod is planned for; None once kube-scheduler has asked about it."""
        pending = self._holding.get(uid)
        return self.node_of(uid) if pending is not None and pending.is_planned else None

    def planned_on(self, node: NodeName) -> list[PodUid]:
        """Return the pods that are planned for a node."""
        return [uid for uid in self._on_node.get(node, ()) if self._holding[uid].is_planned]

    @property
    def planned_nodes(self) -> set[NodeName]:
        """The nodes that pods are planned for."""
        holding = self._holding.values()
        return {one.hold.node for one in holding if one.is_planned and one.hold is not None}

    def asked(self, uid: PodUid) -> None:
        """Make the planned hold of a pod an ordinary one that begins now."""
        pending = self._holding[uid] = self._holding.pop(uid)
        pending.is_planned, pending.held_until = False, self._clock() + self._hold_seconds

    @property
    def is_nominated_pod_ahead(self) -> bool:
        """Whether kube-scheduler is still to try a pod with a nomination."""
        newest_first = reversed(self._records.values())  # as pods with a nomination are mostly new
        nominated = (self._pods.get(one.uid) for one in newest_first if one.nomination is not None)
        return any(pod is not None and not pod.was_tried for pod in nominated)
