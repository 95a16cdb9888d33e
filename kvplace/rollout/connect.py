"""Opens the rollouts of a cluster, for scripts; the command line opens its cluster by its own flags."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec

from kvplace.core.errors import Forbidden
from kvplace.core.scalars import NodeName
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.api_rollouts import ApiRollouts
from kvplace.kube.concurrency import together
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.object_reader import ApiKind, ObjectReader
from kvplace.kube.session import Session, open_session
from kvplace.kube.watches import AGENTS, NAME_FIELD, TOPOLOGIES, Selector
from kvplace.nodes.planning_cluster import PlanningCluster, read_planning_cluster
from kvplace.rollout.cluster_calls import AgentReport
from kvplace.rollout.rollouts import Rollouts

_PODS = ApiKind("pods")
_AGENT = ",".join(f"{key}={value}" for key, value in AGENTS.labels.items())
"""Labels of the agent's pods."""


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
            api.read_all(TOPOLOGIES, Selector(fields={NAME_FIELD: node})), has_agent_pod(session, node)
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


async def has_agent_pod(session: Session, node: NodeName) -> bool | None:
    """Return whether a pod of the agent is ready on a node; None without the right to see it."""
    reader = ObjectReader(session)
    try:
        pods = await reader.read_list_as(_AgentPod, _PODS, labels=_AGENT, fields=f"spec.nodeName={node}")
    except Forbidden:
        return None
    return any(pod.is_ready for pod in pods)


class _AgentCondition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""


class _PodStatus(msgspec.Struct, frozen=True):
    conditions: tuple[_AgentCondition, ...] | None = None


class _AgentPod(msgspec.Struct, frozen=True):
    status: _PodStatus = _PodStatus()

    @property
    def is_ready(self) -> bool:
        return any(one.type == "Ready" and one.status == "True" for one in self.status.conditions or ())
