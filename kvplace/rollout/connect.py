"""Opens the rollouts of a cluster, for scripts; the command line opens its cluster by its own flags."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from kvplace.core.scalars import NodeName
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.api_rollouts import ApiRollouts
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.object_reader import ObjectReader
from kvplace.kube.session import Session, open_session
from kvplace.kube.watches import NAME_FIELD, TOPOLOGIES, Selector
from kvplace.nodes.planning_cluster import PlanningCluster, read_planning_cluster
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

    async def reported_on(node: NodeName) -> frozenset[str] | None:
        found = await api.read_all(TOPOLOGIES, Selector(fields={NAME_FIELD: node}))
        return next((frozenset(one.pods) for one in found if one.by_agent), None)

    return Rollouts(ApiRollouts(session), namespace, read_nodes, reported_on)
