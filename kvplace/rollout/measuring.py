"""Nodes where no agent measures whether VMs are pinned, so that no VM waits for it there.

Only the agent of a node does. It describes its node, and states something about each VM there within seconds.
An agent that was removed leaves all that behind, also what it has reported about VMs. It reports nothing
about VMs that are new; about others it reports nothing new, and has no pod on the node. Where no agent
measures, VMs get a little time for a late report; then running is the last that is known of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from enum import Enum

from kvplace.core.errors import KvplaceError, Unavailable
from kvplace.core.scalars import NodeName
from kvplace.core.vm_stages import VmStage
from kvplace.kube.retry import retrying
from kvplace.rollout.cluster_calls import AgentReader
from kvplace.rollout.tracker import TrackedVm, Tracker

_GRACE_S = 10.0
SILENT_S = 30.0
"""An agent that has reported nothing so long about a VM that runs is not there."""
_ATTEMPTS = 6


class Agent(Enum):
    """The known state of a node's agent."""

    NONE = "none"
    """None describes the node."""
    SILENT = "silent"
    """One has described the node, and reports nothing about the VMs in question."""
    GONE = "gone"
    """One has reported something about them, and has no pod on the node that is ready."""
    SPEAKS = "speaks"
    """It reports something about one of them, or may not be read."""


class Measuring:
    """Asks about every node where VMs run and wait to be pinned."""

    def __init__(self, tracker: Tracker, reported_on: AgentReader, on_change: Callable[[], None]) -> None:
        self._tracker = tracker
        self._reported_on = reported_on
        self._on_change = on_change
        self._asking: dict[NodeName, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Ask about the nodes that are new, without waiting for the answers."""
        for node in waiting_nodes(self._tracker):
            if node not in self._asking:
                self._asking[node] = asyncio.create_task(self._ask(node))

    async def close(self) -> None:
        """Ask no more."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _ask(self, node: NodeName) -> None:
        """Ask as long as VMs wait there: an agent may also go while a rollout runs."""
        while pods := waiting_pods(self._tracker, node):
            before, was_written = await agent_of(node, pods, self._reported_on)
            await asyncio.sleep(_GRACE_S if before is Agent.NONE else SILENT_S)
            pods &= waiting_pods(self._tracker, node)
            if not pods:
                continue
            after, written = await agent_of(node, pods, self._reported_on)
            is_gone = (
                before is Agent.NONE
                if after is Agent.NONE
                else before is not Agent.NONE
                and (after is Agent.SILENT or (after is Agent.GONE and written == was_written))
            )
            if is_gone and pods & waiting_pods(self._tracker, node):
                self._tracker.nobody_measures(node)
                break
        del self._asking[node]
        self._on_change()


def waiting_nodes(tracker: Tracker) -> set[NodeName]:
    """Return the nodes of running VMs that are to be pinned and have no report yet."""
    return {vm.observed.node for vm in tracker.vms.values() if _waits(vm)}


def waiting_pods(tracker: Tracker, node: NodeName, running_before: float = math.inf) -> set[str]:
    """Return the UIDs of the pods of those VMs on a node, of those only that ran before a moment."""
    return {
        uid
        for vm in tracker.vms.values()
        if vm.observed.node == node and _waits(vm)
        if vm.vmi is not None and (vm.vmi.running_since or 0.0) < running_before
        for uid, pod in vm.pods.items()
        if pod.node == node
    }


def _waits(vm: TrackedVm) -> bool:
    is_on_its_way = vm.stage is VmStage.RUNNING and vm.goal is VmStage.PINNED
    return is_on_its_way and bool(vm.observed.node) and not vm.observed.has_ended


async def agent_of(node: NodeName, pods: set[str], reported_on: AgentReader) -> tuple[Agent, str]:
    """State whether the agent of a node works, by its reports about these pods and its last writes."""
    policy = retrying(attempts=_ATTEMPTS, retried=lambda error: isinstance(error, Unavailable))
    try:
        report = await policy(reported_on, node)
    except KvplaceError:
        return Agent.SPEAKS, ""
    if report is None:
        return Agent.NONE, ""
    if report.pods.isdisjoint(pods):
        return Agent.SILENT, report.written
    return (Agent.GONE if report.has_pod is False else Agent.SPEAKS), report.written
