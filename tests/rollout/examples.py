"""Templates, rollouts and a cluster that moves VMs along, for the tests of rollouts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from kvplace.core.occupant import ClusterNode
from kvplace.core.scalars import NodeName
from kvplace.machines.server_types import read_machine
from kvplace.nodes.planning_cluster import PlanningCluster
from kvplace.rollout.rollouts import Rollouts
from kvplace.rollout.run import AgentReader, AgentReport
from kvplace.rollout.templates import Rollout, read_rollout
from tests.rollout.memory_rollouts import NAMESPACE, MemoryRollouts

Json = dict[str, Any]


ASKING = {"cpu-set": "one-numa"}


def vmi(*, cores: int = 2, annotations: Mapping[str, str] = ASKING) -> Json:
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"annotations": dict(annotations)},
        "spec": {"domain": {"cpu": {"cores": cores}, "memory": {"guest": "1Gi"}, "devices": {}}},
    }


def vm(*, cores: int = 2, run: str = "Always", annotations: Mapping[str, str] = ASKING) -> Json:
    inner = vmi(cores=cores, annotations=annotations)
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "template", "labels": {"app": "web"}},
        "spec": {
            "runStrategy": run,
            "template": {"metadata": inner["metadata"], "spec": inner["spec"]},
        },
    }


def rollout(count: int = 6, *, template: Json | None = None, **keys: Any) -> Rollout:
    document = {"name": "web", "vms": [{"template": template or vm(), "count": count}], **keys}
    return read_rollout(document, NAMESPACE)


async def one_server() -> PlanningCluster:
    return PlanningCluster((ClusterNode(NodeName("worker"), read_machine("epyc-7502p")),))


class _Everything(frozenset[str]):
    """Every pod."""

    def isdisjoint(self, other: object) -> bool:
        return False


async def everywhere(node: NodeName) -> AgentReport | None:
    """Let agents speak about all VMs of all nodes."""
    return AgentReport(_Everything(), has_pod=True)


async def nowhere(node: NodeName) -> AgentReport | None:
    """Let no agent describe any node."""
    return None


async def gone(node: NodeName) -> AgentReport | None:
    """Let all agents be gone that have described nodes, before there were VMs."""
    return AgentReport(frozenset())


def rollouts_of(cluster: MemoryRollouts, reported_on: AgentReader = everywhere) -> Rollouts:
    return Rollouts(cluster, NAMESPACE, one_server, reported_on)


def advance(cluster: MemoryRollouts, name: str) -> None:
    """Let a VM come all the way."""
    cluster.bind(name)
    cluster.run(name)
    cluster.pin(name)


@contextlib.asynccontextmanager
async def moving(
    cluster: MemoryRollouts,
    step: Callable[[MemoryRollouts, str], None] = advance,
    *,
    pause_s: float = 0.0,
) -> AsyncIterator[None]:
    """Take one step with every new VM as long as the block runs."""

    async def move() -> None:
        seen: set[str] = set()
        while True:
            for name in cluster.waiting:
                if name not in seen:
                    seen.add(name)
                    step(cluster, name)
            await asyncio.sleep(pause_s)

    task = asyncio.create_task(move())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
