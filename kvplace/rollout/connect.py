"""Opens the rollouts of a cluster, for scripts; the command line opens its cluster by its own flags."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from kvplace.core.errors import Forbidden
from kvplace.core.scalars import NodeName
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.api_rollouts import ApiRollouts
from kvplace.kube.concurrency import together
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.object_client import ObjectReader
from kvplace.kube.session import Session, open_session
from kvplace.kube.watches import AGENT_PODS, AGENTS, NAME_FIELD, NODE_FIELD, TOPOLOGIES, Selector
from kvplace.nodes.planning_cluster import PlanningCluster, read_planning_cluster
from kvplace.rollout.cluster_calls import AgentReport
from kvplace.rollout.rollouts import Rollouts


@contextlib.asynccontextmanager
async def open_rollouts(
    *, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
) -> AsyncIterator[Rollouts]:
    """Open the cluster of a kubeconfig, or the one that this pod runs in, while the block runs.

    Without `namespace` it is the context's.
    """
    async with await open_session(CredentialOptions(kubeconfig, context)) as session:
        yield rollouts_on(session, namespace or session.namespace)


def rollouts_on(session: Session, namespace: str) -> Rollouts:
    """Return the rollouts of a namespace; the session stays its owner's."""
    api = ApiCluster(session)

    async def read_nodes() -> PlanningCluster:
        return await read_planning_cluster(api, ObjectReader(session))

    async def reported_on(node: NodeName) -> AgentReport | None:
        found, has_pod = await together(
            api.read_all(TOPOLOGIES, Selector(fields={NAME_FIELD: node})), has_agent_pod(api, node)
        )
        # A person may have described the node; a status is an agent's in any case.
        spoken = [one for one in found if one.by_agent or one.observed_generation is not None]
        return AgentReport(frozenset(spoken[0].pods), spoken[0].resource_version, has_pod) if spoken else None

    return Rollouts(
        ApiRollouts(session),
        namespace,
        read_nodes,
        reported_on,
        now=lambda: session.server_time,
    )


async def has_agent_pod(api: ApiCluster, node: NodeName) -> bool | None:
    """Return whether a pod of the agent is ready on a node; None without the right to see it."""
    try:
        pods = await api.read_all(AGENT_PODS, replace(AGENTS, fields={NODE_FIELD: node}))
    except Forbidden:
        return None
    return any(pod.is_ready for pod in pods)
