"""A record about a pod goes with it, also when the end of the pod was seen before the question."""

from __future__ import annotations

from kvplace.core.scalars import PodUid
from kvplace.nodes.node_cache import running_node_cache
from kvplace.scheduler.pending_pods import PendingPods
from tests.controller.replicas import asking_pod
from tests.kube.faulty_cluster import FaultyCluster


async def test_records_of_pods_that_are_gone_are_dropped_and_those_of_waiting_pods_are_kept(
    cluster: FaultyCluster,
) -> None:
    waiting = {asking_pod(cluster, f"waiting-{number}").uid for number in range(50)}
    async with running_node_cache(cluster) as cache:
        pending = PendingPods(cluster, cache.pods, cache.dra, lambda: 0.0)
        for uid in waiting:
            pending.begin(uid)
        for number in range(5_000):
            pending.begin(PodUid(f"gone-{number}"))
        assert pending._records.keys() > waiting
        assert len(pending._records) < 400


async def test_records_of_pods_that_the_watch_has_not_shown_yet_are_kept(cluster: FaultyCluster) -> None:
    async with running_node_cache(cluster) as cache:
        pending = PendingPods(cluster, cache.pods, cache.dra, lambda: 0.0)
        for number in range(200):
            pending.begin(PodUid(f"new-{number}"))
        assert len(pending._records) == 200


async def test_the_time_of_a_placement_is_counted_once(cluster: FaultyCluster) -> None:
    moment = [0.0]
    async with running_node_cache(cluster) as cache:
        pending = PendingPods(cluster, cache.pods, cache.dra, lambda: moment[0])
        record = pending.begin(PodUid("one"))
        moment[0] = 2.0
        assert pending.begin(PodUid("one")) is record
        assert (record.attempts, pending.placed_in(record)) == (2, 2.0)
        assert pending.placed_in(record) is None
