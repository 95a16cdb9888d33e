"""The container runtime of this node as one that has plugins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvplace.nri import values as nri
from kvplace.nri.courier import deliver
from kvplace.nri.plugin import Handler, PluginName, run_plugin

PLUGIN = PluginName("kvplace", "50")
COURIER = PluginName("kvplace-courier", "99")


class PluginHost(Protocol):
    """A container runtime that has plugins."""

    async def run(self, handler: Handler, /) -> None:
        """Keep the plugin connected until cancelled."""
        ...

    async def deliver(
        self, choose: Callable[[Sequence[nri.Container]], Sequence[nri.ContainerUpdate]], /
    ) -> None:
        """Have the runtime update containers outside of any event."""
        ...


@dataclass(frozen=True, slots=True)
class NriRuntime:
    """The container runtime behind a socket."""

    socket: Path

    async def run(self, handler: Handler) -> None:
        await run_plugin(self.socket, PLUGIN, handler)

    async def deliver(
        self, choose: Callable[[Sequence[nri.Container]], Sequence[nri.ContainerUpdate]]
    ) -> None:
        await deliver(self.socket, COURIER, choose)
