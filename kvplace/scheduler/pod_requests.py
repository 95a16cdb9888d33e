"""What pods ask for: read once from the annotation, and remembered until the pod is bound or deleted."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Protocol

from kvplace.core.contradictions import check_agreement
from kvplace.core.errors import Refused
from kvplace.core.request_document import PodRequest, read_pod_request
from kvplace.core.scalars import PodUid
from kvplace.kube.events import ObjectReference, vmi_reference
from kvplace.kube.records import PodRecord
from kvplace.kube.store import Store
from kvplace.scheduler.extender_protocol import BindingArgs
from kvplace.scheduler.remembered_pods import forget_gone

_REMEMBERED = 10_000
"""Pods that are remembered at most."""


class PodReader(Protocol):
    """What reading a pod request asks of a cluster."""

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        """Read a pod as the API server has it now; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class AskingPod:
    """A pod that asks for cores, as far as it is of interest until it is bound."""

    pod_request: PodRequest
    vmi: ObjectReference | None
    """None for a plain pod."""
    explanation: str = ""
    """Why its node was chosen, where it asks to keep that."""


class PodRequests:
    """Pods that ask for cores, by UID."""

    def __init__(self, cluster: PodReader, pods: Store[PodUid, PodRecord]) -> None:
        self._cluster = cluster
        self._pods = pods
        self._asking: OrderedDict[PodUid, AskingPod] = OrderedDict()
        pods.subscribe(self._pod_seen)

    def read(self, pod: PodRecord) -> AskingPod | None:
        """Return what a pod asks for; None if it has no request.

        Raises BadAnnotation if the request cannot be read or contradicts itself.
        """
        if not pod.request:
            return None
        uid = pod.uid
        asking = self._asking.get(uid)
        if asking is None:
            asking = self._asking[uid] = _asking_pod(pod)
            forget_gone(self._asking, self._pods.records)
            if len(self._asking) > _REMEMBERED:
                self._asking.popitem(last=False)
        return asking

    def explain(self, uid: PodUid, explanation: str) -> None:
        """Remember why a pod's node was chosen."""
        if uid in self._asking:
            self._asking[uid] = replace(self._asking[uid], explanation=explanation)

    async def of_binding(self, args: BindingArgs) -> AskingPod:
        """Return what a pod asks for that is to be bound; raises Refused if it is gone or has no request."""
        asking = self._asking.get(args.uid)
        if asking is not None:
            return asking
        pod = self._pods.get(args.uid) or await self._cluster.read_pod(args.namespace, args.name)
        if pod is None or pod.uid != args.uid:
            raise Refused(f"pod {args.namespace}/{args.name} with UID {args.uid} is gone")
        if not pod.request:
            raise Refused(f"pod {args.namespace}/{args.name} carries no kvplace.io/request")
        return _asking_pod(pod)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        pod = after or before
        if pod is not None and (after is None or after.node):
            self._asking.pop(pod.uid, None)


def _asking_pod(pod: PodRecord) -> AskingPod:
    pod_request = read_pod_request(pod.request)
    # The admission of another release may have accepted options that exclude each other.
    check_agreement(pod_request.request.options, {})
    vmi = vmi_reference(pod.namespace, pod.vmi, pod.vmi_uid) if pod.vmi else None
    return AskingPod(pod_request, vmi)
