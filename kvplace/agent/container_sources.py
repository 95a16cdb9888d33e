"""Chooses where the containers of this node come from, and so how their cpusets are set."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvplace.agent.cgroup_source import CgroupSource
from kvplace.agent.conditions import TopologyReason
from kvplace.agent.cpuset_keeper import ContainerSource, CpusetKeeper, cpusets_enforced
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.agent.settings import AgentSettings
from kvplace.core.errors import Misconfigured
from kvplace.core.node_topology import Enforcement
from kvplace.linux.cpuset_hierarchy import CgroupVersion, CpusetHierarchy, find_cpuset_hierarchy

_CGROUPS = Path("/sys/fs/cgroup")


def keeper_of(
    settings: AgentSettings, own: NodeObjects, report: NodeReport
) -> tuple[CpusetKeeper, ContainerSource]:
    """Make the keeper with the source that the operator asked for, else with what the node offers.

    A host without cpusets gets a source that never reports a container, with a condition: the rest of
    the agent is of use there, too.
    """
    mounted = settings.on_host(_CGROUPS)
    try:
        hierarchy = find_cpuset_hierarchy(mounted)
    except Misconfigured as error:
        hierarchy = CpusetHierarchy(mounted, CgroupVersion.V2)
        keeper = CpusetKeeper(own, report, hierarchy, observed=Enforcement.NONE)
        keeper.connected(Enforcement.NONE, cpusets_enforced(TopologyReason.NO_CPUSETS, f"{error}."))
        keeper.carry_out()
        return keeper, NoContainers()
    socket = settings.on_host(settings.nri_socket)
    how = settings.enforcement or (Enforcement.NRI if socket.exists() else Enforcement.CGROUP)
    keeper = CpusetKeeper(own, report, hierarchy, observed=None if how.by_agent else how)
    # dra-driver-cpu needs NRI; two plugins may be connected as long as one of them sets no cpuset.
    if how in (Enforcement.NRI, Enforcement.DRA):
        # Costs 4 MiB, which nodes without NRI need not pay.
        from kvplace.agent.nri_source import NriSource
        from kvplace.nri.courier import NriRuntime

        return keeper, NriSource(keeper, NriRuntime(socket), hierarchy.root)
    return keeper, CgroupSource(keeper, own, hierarchy.root)


class NoContainers:
    """Stands in where there are no cpusets."""

    async def run(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()

    def search(self) -> None:
        """Find nothing."""
