"""Updates of containers outside of any event, safe with every version of the runtime.

A plugin may call `UpdateContainers` for that, but containerd before 2.4 can block for good when a container
event meets such a call (containerd/containerd issue 13733). The answer to Synchronize is applied
under the locks in their safe order, so a second, short connection carries the updates there. The runtime does
not state whether they took effect: read the cgroups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvplace.core.errors import KvplaceError, Unavailable
from kvplace.nri.messages import CallFailed
from kvplace.nri.plugin import Handler, PluginName, run_plugin, session
from kvplace.nri.values import ContainerUpdate, Cpuset, Creation, NriContainer, NriEvent, PodSandbox, Runtime

MAX_UPDATES = 50
"""Most updates of one connection: the runtime needs about 10 ms for each and creates no container then."""
_TIMEOUT_S = 30.0


async def deliver(
    socket: Path,
    name: PluginName,
    choose: Callable[[Sequence[NriContainer]], Sequence[ContainerUpdate]],
) -> None:
    """Have the runtime update containers.

    `choose` gets all containers with their specs of now, and returns at most MAX_UPDATES updates. `name` must
    differ from the name of the plugin that answers for new containers. Returns when the runtime has
    the answer; it needs about 10 ms more for each container in it. Raises Unavailable or Misconfigured.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S), session(socket, name, _Courier(choose)) as connection:
            # It reads our frames in their order: an answer to this shows that it has the one before. A
            # runtime that finds the connection closed may drop frames that it has not passed on yet.
            with suppress(CallFailed):
                await connection.call("Ping", b"", timeout_s=_TIMEOUT_S)
    except TimeoutError:
        raise Unavailable(f"the NRI runtime did not take updates within {_TIMEOUT_S:g} s") from None


PLUGIN = PluginName("kvplace", "50")
COURIER = PluginName("kvplace-courier", "99")


@dataclass(frozen=True, slots=True)
class NriRuntime:
    """The container runtime behind a socket, as kvplace's plugin and its courier reach it."""

    socket: Path

    async def run(self, handler: Handler) -> None:
        """Keep the plugin connected until cancelled."""
        await run_plugin(self.socket, PLUGIN, handler)

    async def deliver(self, choose: Callable[[Sequence[NriContainer]], Sequence[ContainerUpdate]]) -> None:
        """Have the runtime update containers outside of any event."""
        await deliver(self.socket, COURIER, choose)


class _Courier:
    """A handler that wants nothing but its updates."""

    events = frozenset({NriEvent.REMOVE_POD})  # the rarest; none would mean all

    def __init__(self, choose: Callable[[Sequence[NriContainer]], Sequence[ContainerUpdate]]) -> None:
        self._choose = choose

    async def synchronize(
        self, runtime: Runtime, pods: Sequence[PodSandbox], containers: Sequence[NriContainer]
    ) -> Sequence[ContainerUpdate]:
        return self._choose(containers)[:MAX_UPDATES]

    async def create(self, pod: PodSandbox, container: NriContainer) -> Creation:
        return Creation()

    async def update(
        self, pod: PodSandbox, container: NriContainer, asked: Cpuset
    ) -> Sequence[ContainerUpdate]:
        return ()

    async def stop(self, pod: PodSandbox, container: NriContainer) -> Sequence[ContainerUpdate]:
        return ()

    async def observe(self, event: NriEvent, pod: PodSandbox, container: NriContainer) -> None:
        pass

    def disconnected(self, reason: KvplaceError) -> None:
        pass
