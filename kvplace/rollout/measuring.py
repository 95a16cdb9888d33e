"""On which nodes nobody measures whether VMs are pinned, so that nobody waits for it there.

Only the agent of a node does. One that describes its node runs there, or did. Where none does, VMs get a
little time in which somebody may say something all the same; then running is the last that is known of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvplace.core.errors import KvplaceError, Unavailable
from kvplace.core.scalars import NodeName
from kvplace.core.vm_stage import VmStage
from kvplace.kube.retry import retrying
from kvplace.rollout.port import AgentReader
from kvplace.rollout.tracker import Tracker

_GRACE_S = 10.0
_ATTEMPTS = 6


class Measuring:
    """Asks once about every node on which VMs run and wait to be pinned."""

    def __init__(self, tracker: Tracker, has_agent: AgentReader, on_change: Callable[[], None]) -> None:
        self._tracker = tracker
        self._has_agent = has_agent
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
        if not await lacks_agent(node, self._has_agent):
            return
        await asyncio.sleep(_GRACE_S)
        self._tracker.nobody_measures(node)
        self._on_change()


def waiting_nodes(tracker: Tracker) -> set[NodeName]:
    """Return the nodes of the VMs that run and are to be pinned, of which nobody has said anything yet."""
    return {
        vm.observed.node
        for vm in tracker.vms.values()
        if vm.stage is VmStage.RUNNING and vm.goal is VmStage.PINNED and vm.observed.node
    }


async def lacks_agent(node: NodeName, has_agent: AgentReader) -> bool:
    """Say whether it is certain that no agent describes a node; not where that may not be read."""
    policy = retrying(attempts=_ATTEMPTS, retried=lambda error: isinstance(error, Unavailable))
    try:
        return not await policy(has_agent, node)
    except KvplaceError:
        return False
