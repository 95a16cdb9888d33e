"""A rollout sees whether a node has a pod of the agent that is ready, as far as its user may."""

from __future__ import annotations

from harness.control_plane.cluster import STRATEGIC_MERGE_PATCH
from kvplace.core.scalars import NodeName
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.session import open_session
from kvplace.rollout.rollouts import has_agent_pod
from tests.cli.live_cluster.small_cluster import SmallCluster

LABELS = {"app.kubernetes.io/name": "kvplace", "app.kubernetes.io/component": "agent"}


async def seen(cluster: SmallCluster, node: str, user: str | None = None) -> bool | None:
    options = CredentialOptions(str(cluster.plane.kubeconfig), user=user)
    async with await open_session(options) as session:
        return await has_agent_pod(ApiCluster(session), NodeName(node))


async def test_a_pod_of_the_agent_counts_on_its_node_once_it_is_ready(cluster: SmallCluster) -> None:
    pods = f"/api/v1/namespaces/{cluster.other}/pods"
    spec = {"nodeName": cluster.second, "containers": [{"name": "agent", "image": "none"}]}
    cluster.plane.request("POST", pods, {"metadata": {"name": "agent", "labels": LABELS}, "spec": spec})
    try:
        assert await seen(cluster, cluster.second) is False
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        path = f"{pods}/agent/status"
        cluster.plane.request("PATCH", path, ready, content_type=STRATEGIC_MERGE_PATCH)
        assert await seen(cluster, cluster.second) is True
        assert await seen(cluster, cluster.first) is False
        assert await seen(cluster, cluster.second, user="eve") is None
    finally:
        cluster.plane.request("DELETE", f"{pods}/agent?gracePeriodSeconds=0")
