"""What pods asked for: read once from the annotation, remembered until the pod is bound or gone."""

from __future__ import annotations

from dataclasses import dataclass

from kvplace.core.contradictions import check_agreement
from kvplace.core.errors import Refused
from kvplace.core.request_document import PodRequest, read_request
from kvplace.kube.cluster import Cluster
from kvplace.kube.records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.scheduler.wire import BindingArgs, OwnerReference, WirePod


@dataclass(frozen=True, slots=True)
class Asked:
    """What a pod asked for, and for which VMI."""

    wanted: PodRequest
    vmi: OwnerReference | None
    """None for a plain pod, and when this replica has not been asked to filter for it."""


class Wishes:
    """What pods asked for, by UID, with the reasons for their nodes where they asked to keep those."""

    def __init__(self, cluster: Cluster, cache: NodeCache) -> None:
        self._cluster = cluster
        self._cache = cache
        self._asked: dict[str, Asked] = {}
        self.explanations: dict[str, str] = {}
        cache.pods.subscribe(self._pod_seen)

    def of_wire(self, pod: WirePod) -> Asked | None:
        """What a pod asked for that kube-scheduler sends; None when it asks for nothing.

        Raises BadAnnotation when that cannot be read, or contradicts itself.
        """
        if not pod.request:
            return None
        uid = pod.metadata.uid
        asked = self._asked.get(uid)
        if asked is None:
            asked = self._asked[uid] = Asked(_read(pod.request), pod.vmi)
        return asked

    async def of_binding(self, args: BindingArgs) -> Asked:
        """What a pod asked for that is to be bound; raises Refused when it is gone or asks for nothing."""
        known = self._asked.get(args.uid)
        if known is not None:
            return known
        pod = self._cache.pods.get(args.uid) or await self._cluster.read_pod(args.namespace, args.name)
        if pod is None or pod.uid != args.uid:
            raise Refused(f"pod {args.namespace}/{args.name} with UID {args.uid} is gone")
        if not pod.request:
            raise Refused(f"pod {args.namespace}/{args.name} carries no kvplace.io/request")
        return Asked(_read(pod.request), None)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        pod = after or before
        if pod is not None and (after is None or after.node):
            self._asked.pop(pod.uid, None)
            self.explanations.pop(pod.uid, None)


def _read(text: str) -> PodRequest:
    """Read a request; another release's admission may have let words through that exclude each other."""
    wanted = read_request(text)
    check_agreement(wanted.request.options, {})
    return wanted
