"""A node whose container runtime has NRI, with an agent; everything is played in memory."""

from __future__ import annotations

from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.node_plan import ThisNode
from kvplace.agent.node_report import NodeReport
from kvplace.agent.nri_source import NriSource
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import PodUid
from tests.agent.nodes_in_use import PLAIN, VM, node_with, placed
from tests.agent.played_runtime import PlayedContainer, PlayedObjects, PlayedRuntime, now

EMPTY = node_with()
ONE_VM = node_with(placed(VM, "2-3"))


class Node:
    """A node with a runtime and an agent."""

    def __init__(
        self, state: ThisNode, *, sweep_s: float = 600.0, observed: Enforcement | None = None
    ) -> None:
        self._observed = observed
        self.objects = PlayedObjects(state)
        self.runtime = PlayedRuntime(state.topology.cpus)
        self.report = NodeReport()
        self._sweep_s = sweep_s
        self.restart_agent()

    def restart_agent(self) -> None:
        """Start an agent anew; it is connected at once."""
        self.keeper = CpusetKeeper(
            self.objects,
            self.report,
            self.runtime.cgroups,
            observed=self._observed,
            sweep_s=self._sweep_s,
            starting_s=0.0,
        )
        self.source = NriSource(self.keeper, self.runtime, self.runtime.cgroups.root)
        self.runtime.connect(self.source)

    def change(self, state: ThisNode) -> None:
        """Let the agent see another state of its node and carry it out."""
        self.objects.become(state)
        self.carry_out()

    def carry_out(self) -> None:
        """Let the agent act on the state of its node: cgroups, then specs."""
        self.keeper.carry_out()
        now(self.source.carry_specs())

    def check(self, container: PlayedContainer) -> None:
        """Let the agent learn that a cgroup was written."""
        self.keeper.check([container.id])

    def started(self, uid: PodUid, name: str) -> PlayedContainer:
        pods = self.runtime.pods.values()
        pod = next((found for found in pods if found.uid == uid), None)
        container = self.runtime.create(pod or self.runtime.run_pod(uid, vm=uid != PLAIN), name)
        self.runtime.start(container)
        return container

    def cgroup(self, container: PlayedContainer) -> str:
        return format_cpu_list(self.runtime.cpus_of(container))
