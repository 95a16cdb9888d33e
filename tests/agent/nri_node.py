"""A node whose container runtime has NRI, with an agent; everything is played in memory."""

from __future__ import annotations

from kvplace.agent.node_report import NodeReport
from kvplace.agent.node_state import NodeState
from kvplace.agent.nri_enforcement import NriEnforcement
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.scalars import PodUid
from tests.agent.nodes_in_use import PLAIN, VM, node_with, placed
from tests.agent.played_runtime import PlayedContainer, PlayedObjects, PlayedRuntime, now

EMPTY = node_with()
ONE_VM = node_with(placed(VM, "2-3"))


class Node:
    """A node with a runtime and an agent."""

    def __init__(self, state: NodeState) -> None:
        self.objects = PlayedObjects(state)
        self.runtime = PlayedRuntime(state.topology.cpus)
        self.report = NodeReport()
        self.restart_agent()

    def restart_agent(self) -> None:
        self.agent = NriEnforcement(self.objects, self.report, self.runtime.cgroups, self.runtime)
        self.runtime.connect(self.agent)

    def change(self, state: NodeState) -> None:
        """Let the agent see another state of its node and carry it out."""
        self.objects.become(state)
        now(self.agent.carry_out())

    def started(self, uid: PodUid, name: str) -> PlayedContainer:
        pods = self.runtime.pods.values()
        pod = next((found for found in pods if found.uid == uid), None)
        container = self.runtime.create(pod or self.runtime.run_pod(uid, vm=uid != PLAIN), name)
        self.runtime.start(container)
        return container

    def cgroup(self, container: PlayedContainer) -> str:
        return format_cpu_list(self.runtime.cpus_of(container))
