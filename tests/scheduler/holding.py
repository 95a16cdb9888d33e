"""Pending pods and holds for tests, of a pod that would own one CPU."""

from __future__ import annotations

from collections.abc import Callable

from kvplace.core.cpuset import mask_of
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import CpuId, NodeName
from kvplace.nodes.node_cache import NodeCache
from kvplace.scheduler.pending_pods import Hold, PendingPods
from tests.kube.example_claims import claim
from tests.kube.faulty_cluster import FaultyCluster


def pending_pods(
    cache: NodeCache | None = None,
    *,
    clock: Callable[[], float] = lambda: 0.0,
    changed: Callable[[NodeName], None] = lambda _node: None,
) -> PendingPods:
    """Make a table with holds of three seconds; without a cache it knows no pod."""
    cluster = FaultyCluster()
    known = cache if cache is not None else NodeCache(cluster)
    pending = PendingPods(cluster, known, hold_seconds=3.0, clock=clock)
    pending.subscribe_changes(changed)
    return pending


def hold(node: str, uid: str, cpu: int) -> Hold:
    placement = Placement(Policy.EXCLUSIVE, (CpuId(cpu),), mask_of([cpu]))
    return Hold(NodeName(node), claim(uid, cpu), placement, fingerprint="of another machine")
