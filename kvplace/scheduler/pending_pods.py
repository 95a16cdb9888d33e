"""The pods that kube-scheduler has asked about, one record each, until they are bound or gone.

A record has the request of the pod, how often and since when kube-scheduler has tried it, why it was
refused last, and why its node was chosen. UID and attempt together name one decision in the log.

One rule forgets records: when the watch shows that a pod is bound or gone, its record goes. If the end of a
pod was seen before the question, nothing would remove the record. So each new record examines the two oldest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from kvplace.core.annotations import check_agreement
from kvplace.core.errors import Refused
from kvplace.core.request_json import PodRequest, read_pod_request
from kvplace.core.scalars import NodeName, PodUid, ResourceName
from kvplace.kube.events import ObjectReference, vmi_reference
from kvplace.kube.object_records import PodRecord
from kvplace.kube.store import Store
from kvplace.nodes.dra_devices import DraDevices
from kvplace.scheduler.extender_protocol import BindingArgs

_SAME_ATTEMPT_S = 1.0
"""Between two questions of one attempt; the next attempt comes a second later, or after a change."""
_MOST = 10_000
"""Records that are kept at most; the oldest goes first."""
_NEWEST = 256
"""Records that are not examined: the watch may not have shown their pods yet."""
_EXAMINED = 2


class PodReader(Protocol):
    """The cluster calls of reading a pod request."""

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        """Read a pod as the API server has it now; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class AskingPod:
    """The request of a pod, and its VMI."""

    pod_request: PodRequest
    vmi: ObjectReference | None
    """None for a plain pod."""
    migration: str = ""
    """The live migration that the pod is the target of; empty for another pod."""
    extended: frozenset[ResourceName] = frozenset()
    """Extended resources that kube-scheduler allocates as devices (DRA); `pod_request` is without them."""


@dataclass(slots=True)
class PendingPod:
    """The state of a pod that is not bound yet."""

    asking: AskingPod | None = None
    """None until the request is read."""
    attempts: int = 0
    """How often Filter was asked about it."""
    since: float | None = None
    """When Filter was asked first; None also after the placement was counted."""
    refusal: str = ""
    """Why it was refused last; empty if it was not."""
    explanation: str = ""
    """Why its node was chosen, for `kvplace.io/explain`."""
    nominated_refused_at: float = float("-inf")
    curable: tuple[NodeName, ...] = ()
    """Nodes where only cores were missing at `curable_at`: preemption may help there."""
    curable_at: float = float("-inf")
    refused_binds: dict[NodeName, tuple[str, str]] = field(default_factory=dict)
    """Nodes that Bind has refused to a pod with devices: version of the ledger, and why."""
    leaving: dict[PodUid, float] = field(default_factory=dict)
    """The pods that end anyway and that it waits for, and since when."""

    def is_news(self, refusal: str) -> bool:
        """Keep why the pod does not fit; returns whether its last refusal had another reason."""
        is_news, self.refusal = refusal != self.refusal, refusal
        return is_news


class PendingPods:
    """Records by pod UID."""

    def __init__(
        self,
        cluster: PodReader,
        pods: Store[PodUid, PodRecord],
        dra: DraDevices,
        clock: Callable[[], float],
    ) -> None:
        """`clock` times attempts."""
        self._cluster = cluster
        self._pods = pods
        self._dra = dra
        self._clock = clock
        self._records: OrderedDict[PodUid, PendingPod] = OrderedDict()
        pods.subscribe(self._pod_seen)

    def get(self, uid: PodUid) -> PendingPod:
        """Return the record of a pod; one that is not kept if Filter was not asked about it here."""
        return self._records.get(uid) or PendingPod()

    def begin(self, uid: PodUid) -> PendingPod:
        """Count a question of Filter, and return the record of the pod."""
        pending = self._record(uid)
        pending.attempts += 1
        if pending.attempts == 1:
            pending.since = self._clock()
        return pending

    def request_of(self, pod: PodRecord) -> AskingPod | None:
        """Return the request of a pod; None if it has none.

        Raises BadAnnotation if the request cannot be read or contradicts itself.
        """
        if not pod.request:
            return None
        pending = self._record(pod.uid)
        if pending.asking is None:
            pending.asking = self._asking_pod(pod)
        return pending.asking

    async def of_binding(self, args: BindingArgs) -> AskingPod:
        """Return the request of a pod that is to be bound; raises Refused if the pod is gone or has none."""
        asking = self.get(args.uid).asking
        if asking is not None:
            return asking
        pod = self._pods.get(args.uid) or await self._cluster.read_pod(args.namespace, args.name)
        if pod is None or pod.uid != args.uid:
            raise Refused(f"pod {args.namespace}/{args.name} with UID {args.uid} is gone")
        if not pod.request:
            raise Refused(f"pod {args.namespace}/{args.name} carries no kvplace.io/request")
        return self._asking_pod(pod)

    def nominated_refused_twice(self, uid: PodUid) -> bool:
        """Keep that a pod's nominated node alone is refused; returns whether it was a moment ago, too.

        kube-scheduler asks about this node first, and then at once about all that it accepts. The second
        question is the same as the first where it accepts no other.
        """
        pending, now = self.get(uid), self._clock()
        is_second = now - pending.nominated_refused_at < _SAME_ATTEMPT_S
        pending.nominated_refused_at = float("-inf") if is_second else now
        return is_second

    def bind_refused(self, uid: PodUid, node: NodeName, version: str, why: str) -> None:
        """Keep that Bind has refused a node to a pod while its ledger had this version."""
        self._record(uid).refused_binds[node] = version, why

    def placed_in(self, pending: PendingPod) -> float | None:
        """Return the seconds from the first question until now, once; None if Filter was not asked here."""
        since, pending.since = pending.since, None
        return None if since is None else self._clock() - since

    def _record(self, uid: PodUid) -> PendingPod:
        found = self._records.get(uid)
        if found is None:
            found = self._records[uid] = PendingPod()
            self._forget_gone()
            if len(self._records) > _MOST:
                self._records.popitem(last=False)
        return found

    def _forget_gone(self) -> None:
        if len(self._records) > _NEWEST:
            for uid in list(islice(self._records, _EXAMINED)):
                if uid in self._pods.records:
                    self._records.move_to_end(uid)
                else:
                    del self._records[uid]

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        pod = after or before
        if pod is not None and (after is None or after.node):
            self._records.pop(pod.uid, None)

    def _asking_pod(self, pod: PodRecord) -> AskingPod:
        pod_request = read_pod_request(pod.request)
        request = pod_request.request
        # The admission of another release may have accepted options that exclude each other.
        check_agreement(request.options, {})
        vmi = vmi_reference(pod.namespace, pod.vmi, pod.vmi_uid) if pod.vmi else None
        extended = self._dra.extended_resources.intersection(request.devices)
        if extended:
            counted = {name: count for name, count in request.devices.items() if name not in extended}
            pod_request = replace(pod_request, request=replace(request, devices=counted))
        return AskingPod(pod_request, vmi, pod.migration, extended)
