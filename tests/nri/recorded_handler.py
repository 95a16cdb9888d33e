"""A handler that notes its calls and answers what a test has prepared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvplace.core.errors import KvplaceError
from kvplace.nri.plugin import NriHandler
from kvplace.nri.values import ContainerUpdate, Cpuset, Creation, NriContainer, NriEvent, PodSandbox, Runtime


@dataclass
class RecordedHandler(NriHandler):
    events: frozenset[NriEvent] = frozenset({NriEvent.CREATE, NriEvent.START, NriEvent.STOP})
    updates: Sequence[ContainerUpdate] = ()
    creation: Creation = field(default_factory=Creation)
    fails_with: Exception | None = None
    blocked: asyncio.Event | None = None
    """Calls wait for it, where there is one."""
    calls: list[tuple[object, ...]] = field(default_factory=list)
    steps: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    """The begin and the end of each call, as they happen."""
    pods: Sequence[PodSandbox] = ()
    containers: Sequence[NriContainer] = ()
    gone: asyncio.Queue[KvplaceError] = field(default_factory=asyncio.Queue)

    async def _note(self, *call: object) -> None:
        self.calls.append(call)
        self.steps.put_nowait(f"{call[0]} begins")
        if self.blocked is not None:
            await self.blocked.wait()
        if self.fails_with is not None:
            raise self.fails_with
        self.steps.put_nowait(f"{call[0]} ends")

    async def synchronize(
        self, runtime: Runtime, pods: Sequence[PodSandbox], containers: Sequence[NriContainer]
    ) -> Sequence[ContainerUpdate]:
        self.pods, self.containers = pods, containers
        await self._note("synchronize", runtime)
        return self.updates

    async def create(self, pod: PodSandbox, container: NriContainer) -> Creation:
        await self._note("create", pod, container)
        return self.creation

    async def update(
        self, pod: PodSandbox, container: NriContainer, asked: Cpuset
    ) -> Sequence[ContainerUpdate]:
        await self._note("update", pod, container, asked)
        return self.updates

    async def stop(self, pod: PodSandbox, container: NriContainer) -> Sequence[ContainerUpdate]:
        await self._note("stop", pod, container)
        return self.updates

    async def observe(self, event: NriEvent, pod: PodSandbox, container: NriContainer) -> None:
        await self._note("observe", event, pod, container)

    async def reached(self, step: str) -> None:
        """Wait until a call has begun or ended."""
        while await self.steps.get() != step:
            pass

    def disconnected(self, reason: KvplaceError) -> None:
        self.gone.put_nowait(reason)
