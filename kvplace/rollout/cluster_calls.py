"""The cluster calls of a rollout: `kvplace.kube.api_rollouts` answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from kvplace.core.scalars import NodeName
from kvplace.kube.api_rollouts import Quota
from kvplace.kube.watches import EVERYTHING, Kind, Selector, WatchEvent
from kvplace.nodes.planning_cluster import PlanningCluster

K = TypeVar("K")
R = TypeVar("R")

NodeReader: TypeAlias = Callable[[], Awaitable[PlanningCluster]]
"""Reads the nodes with their running and waiting VMs, for the forecast."""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The last writes of a node's agent, and whether it is still there."""

    pods: AbstractSet[str]
    """The UIDs of the pods in its report."""
    written: str = ""
    """Changes with everything that it writes."""
    has_pod: bool | None = None
    """Whether a pod of the agent is ready on the node; None where that may not be read."""


AgentReader: TypeAlias = Callable[[NodeName], Awaitable[AgentReport | None]]
"""Reads the report of a node's agent; None where none describes the node."""


class RolloutCluster(Protocol):
    """VMs and the documents of rollouts."""

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]: ...

    async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]: ...

    async def apply_vm(self, vm: Mapping[str, Any], *, dry_run: bool = False) -> None: ...

    async def delete_vm(self, kind: str, namespace: str, name: str, uid: str) -> None: ...

    async def read_documents(self, namespace: str, rollout: str = "") -> Mapping[str, str]: ...

    async def store_document(self, namespace: str, rollout: str, text: str) -> None: ...

    async def delete_document(self, namespace: str, rollout: str) -> None: ...

    async def read_quotas(self, namespace: str) -> tuple[Quota, ...]: ...
