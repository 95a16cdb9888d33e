"""Updates of containers outside of any event, safe with every version of the runtime.

A plugin may call `UpdateContainers` for that, but containerd before 2.4 can block for good when a container
event meets such a call (containerd/containerd issue 13733). What a plugin answers to Synchronize is applied
under the locks in their safe order, so a second, short connection carries the updates there. The runtime does
not say whether they took effect: read the cgroups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvplace.core.errors import KvplaceError, Unavailable
from kvplace.nri.messages import CallFailed
from kvplace.nri.plugin import PluginName, session
from kvplace.nri.values import Container, ContainerUpdate, Cpuset, Creation, Event, PodSandbox, Runtime

MAX_UPDATES = 50
"""Most updates of one connection: the runtime needs about 10 ms for each and creates no container then."""
_TIMEOUT_S = 30.0


async def deliver(socket: Path, name: PluginName, updates: Sequence[ContainerUpdate]) -> None:
    """Have the runtime update containers, in this order; those that are gone are left out.

    `name` must be another one than that of the plugin that creates containers. Returns when the runtime has
    the last answer; it needs about 10 ms more for each container in it. Raises Unavailable or Misconfigured.
    """
    for start in range(0, len(updates), MAX_UPDATES):
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await _deliver(socket, name, updates[start : start + MAX_UPDATES])
        except TimeoutError:
            raise Unavailable(f"the NRI runtime did not take updates within {_TIMEOUT_S:g} s") from None


async def _deliver(socket: Path, name: PluginName, updates: Sequence[ContainerUpdate]) -> None:
    async with session(socket, name, _Courier(updates)) as connection:
        # It reads our frames in their order: an answer to this shows that it has the one before. A runtime
        # that finds the connection closed may drop what it has not passed on yet.
        with suppress(CallFailed):
            await connection.call("Ping", b"", timeout_s=_TIMEOUT_S)


class _Courier:
    """A handler that wants nothing but its updates."""

    events = frozenset({Event.REMOVE_POD})  # the rarest; none would mean all

    def __init__(self, updates: Sequence[ContainerUpdate]) -> None:
        self._updates = updates

    async def synchronize(
        self, runtime: Runtime, pods: Sequence[PodSandbox], containers: Sequence[Container]
    ) -> Sequence[ContainerUpdate]:
        known = {container.id for container in containers}
        return [update for update in self._updates if update.container in known]

    async def create(self, pod: PodSandbox, container: Container) -> Creation:
        return Creation()

    async def update(self, pod: PodSandbox, container: Container, asked: Cpuset) -> Sequence[ContainerUpdate]:
        return ()

    async def stop(self, pod: PodSandbox, container: Container) -> Sequence[ContainerUpdate]:
        return ()

    async def observe(self, event: Event, pod: PodSandbox, container: Container) -> None:
        pass

    def disconnected(self, reason: KvplaceError) -> None:
        pass
