"""ResourceClaims of dra-driver-cpu in stories where the driver sets the cpusets of all nodes.

kube-scheduler allocates before it asks for a bind, keeps the allocation after a refused bind, and frees it
when Filter refuses the node. `serve` writes the CPUs of the ledger into it.
"""

from __future__ import annotations

from dataclasses import replace

from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.claimed_cpus import CLEARED
from kvplace.kube.memory_objects import with_status
from kvplace.kube.object_records import CPU_DRIVER, PodRecord, ResourceClaimRecord
from tests.kube.faulty_cluster import FaultyCluster
from tests.protocol.run_counts import Diary

_UNANSWERED_S = 30.0
"""Longer than a bind and its last request: before, kube-scheduler frees nothing of that pod."""


class CpuClaims:
    """The resource claims of all pods of a story, each named after its pod's UID."""

    def __init__(self, cluster: FaultyCluster, diary: Diary) -> None:
        self._cluster = cluster
        self._diary = diary
        self._tried: dict[PodUid, float] = {}
        self._busy: set[PodUid] = set()

    def create(self, pod: PodRecord) -> None:
        """Give a pod its resource claim."""
        self._cluster.put_resource_claim(ResourceClaimRecord(pod.namespace, pod.uid))
        self._cluster._put_pod(replace(pod, resource_claims=(pod.uid,)))

    def begin(self, pod: PodRecord) -> bool:
        """Begin an attempt; False while there is one, since one kube-scheduler has one at a time."""
        if pod.uid in self._busy:
            return False
        self._busy.add(pod.uid)
        return True

    def end(self, pod: PodRecord) -> None:
        """End an attempt: a pod without a node gives its reservation back, and the allocation stays."""
        self._busy.discard(pod.uid)
        claim, live = self._claim(pod), self._cluster._pods.get((pod.namespace, pod.name))
        is_bound = live is not None and live.uid == pod.uid and live.node
        if claim is not None and claim.allocated and not is_bound and claim.status.get("reservedFor"):
            self._put(claim, {**claim.status, "reservedFor": []})

    def node(self, pod: PodRecord) -> NodeName | None:
        """Return the only node that a pod may be on by its allocation."""
        claim = self._claim(pod)
        return NodeName(claim.allocated[0][1]) if claim is not None and claim.allocated else None

    def allocate(self, pod: PodRecord, node: NodeName) -> None:
        """Allocate CPUs of a node, unless that is done, and reserve them for the pod."""
        self._tried[pod.uid] = self._diary.clock()
        claim = self._claim(pod)
        if claim is None:
            return
        result = {
            "request": "cpus",
            "driver": CPU_DRIVER,
            "pool": node,
            "device": "cpudevmachine",
            "consumedCapacity": {"dra.cpu/cpu": str(read_pod_request(pod.request).request.vcpus)},
        }
        allocation = claim.status.get("allocation") or {"devices": {"results": [result]}}
        self._put(claim, {"allocation": allocation, "reservedFor": [{"uid": pod.uid}]})

    def free(self, pod: PodRecord) -> None:
        """Free the allocation of a pod after Filter has refused its node."""
        claim = self._claim(pod)
        is_over = self._diary.clock() - self._tried.get(pod.uid, -_UNANSWERED_S) >= _UNANSWERED_S
        if claim is not None and claim.allocated and is_over:
            self._put(claim, dict(CLEARED))

    def _claim(self, pod: PodRecord) -> ResourceClaimRecord | None:
        return self._cluster._resource_claims.get((pod.namespace, pod.uid))

    def _put(self, claim: ResourceClaimRecord, status: dict[str, object]) -> None:
        self._cluster.put_resource_claim(with_status(claim, status))


def given_cpus(claim: ResourceClaimRecord | None) -> str:
    """Return the CPUs that the driver would give to the container of a resource claim; empty for none."""
    allocation = None if claim is None else claim.status.get("allocation")
    config = [] if allocation is None else allocation["devices"].get("config", [])
    return "".join(one["opaque"]["parameters"]["cpuConfig"]["cpuset"] for one in config)
