"""Chooses how cpusets are set on this node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from kvplace.agent.cgroup_enforcement import CgroupEnforcement
from kvplace.agent.conditions import TopologyCondition, TopologyReason
from kvplace.agent.containers import Container
from kvplace.agent.cpusets import Cpusets
from kvplace.agent.enforced_containers import EnforcedContainers
from kvplace.agent.node_report import NodeReport
from kvplace.agent.own_node import OwnNode
from kvplace.agent.settings import AgentSettings
from kvplace.core.enforcement import Enforcement
from kvplace.core.errors import Misconfigured
from kvplace.core.scalars import NO_CPUS, ContainerId
from kvplace.kube.conditions import Condition
from kvplace.linux.cpuset_hierarchy import find_cpuset_hierarchy
from kvplace.linux.kernel_files import Gone

_CGROUPS = Path("/sys/fs/cgroup")


class Enforcer(EnforcedContainers, Protocol):
    """The component that sets cpusets."""

    async def run(self) -> None:
        """Enforce until cancelled."""
        ...


def enforcer_of(settings: AgentSettings, own: OwnNode, report: NodeReport) -> Enforcer:
    """Make the component for what the operator asked for, else for what the node offers.

    A host without cpusets gets one that does nothing but report it: the rest of the agent is of use there,
    too.
    """
    try:
        hierarchy = find_cpuset_hierarchy(settings.on_host(_CGROUPS))
    except Misconfigured as error:
        report.enforce(Enforcement.NONE)
        report.put_condition(
            Condition(TopologyCondition.CPUSETS_ENFORCED, False, TopologyReason.NO_CPUSETS, f"{error}.")
        )
        return _NoCpusets()
    socket = settings.on_host(settings.nri_socket)
    match settings.enforcement or (Enforcement.NRI if socket.exists() else Enforcement.CGROUP):
        case Enforcement.NRI:
            # Costs 4 MiB, which nodes without NRI need not pay.
            from kvplace.agent.nri_enforcement import NriEnforcement
            from kvplace.agent.nri_runtime import NriRuntime

            return NriEnforcement(own, report, hierarchy, NriRuntime(socket))
        case how:
            return CgroupEnforcement(own, report, hierarchy, observes_only=how is Enforcement.NONE)


class _NoCpusets:
    """Stands in where there are no cpusets."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    def containers(self) -> Iterable[Container]:
        return ()

    def cpusets(self) -> Cpusets:
        return Cpusets(NO_CPUS, {}, {})

    def cgroup_of(self, container: ContainerId) -> Path:
        raise Gone(f"container {container} has no cpuset")
