"""Faults of a node's agent, in one sentence, for readers of the map.

An agent writes what it measures, and whether it is well. What it has written stays when it is gone, and then
seems as true as before. So its pod is checked, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import AgentPod, TopologyRecord
from kvplace.kube.store import Store

GONE = "its agent is gone or not ready: it measures nothing, and its last report may be old"


class Agents:
    """The agents of all nodes, as far as their pods may be seen."""

    def __init__(self, pods: Store[PodUid, AgentPod]) -> None:
        """`pods` are those of agents; none is called gone before their list is complete."""
        self._pods = pods
        self._ready: dict[NodeName, set[PodUid]] = {}
        self._listeners: list[Callable[[NodeName], None]] = []
        pods.subscribe(self._seen)

    def subscribe(self, listener: Callable[[NodeName], None]) -> None:
        """Call the listener with the node of an agent that has come, gone, or changed how it is."""
        self._listeners.append(listener)

    async def announce(self, nodes: Collection[NodeName]) -> None:
        """Call the listeners with every node as soon as the list of the agents' pods is complete."""
        await self._pods.wait_until_synced()
        for node in tuple(nodes):
            self._tell(node)

    def trouble(self, node: NodeName, described: TopologyRecord | None) -> str:
        """State what is wrong with the agent of a node; empty where all is well, or none belongs there."""
        if described is None:
            return ""
        belongs = described.by_agent or described.observed_generation is not None
        if belongs and self._pods.has_synced and not self._ready.get(node):
            return GONE
        for condition in described.conditions:
            if condition.type == "Ready" and condition.status is False:
                return f"its agent reports {condition.reason}: {condition.message}"
        seen = described.observed_generation
        if seen is not None and seen < described.generation:
            return "its agent has not seen the newest description yet"
        return ""

    def _seen(self, before: AgentPod | None, after: AgentPod | None) -> None:
        for pod in (before, after):
            if pod is not None:
                self._ready.setdefault(pod.node, set()).discard(pod.uid)
        if after is not None and after.is_ready:
            self._ready[after.node].add(after.uid)
        for node in {pod.node for pod in (before, after) if pod is not None}:
            self._tell(node)

    def _tell(self, node: NodeName) -> None:
        for listener in self._listeners:
            listener(node)
