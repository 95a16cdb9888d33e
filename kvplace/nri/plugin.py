"""A container runtime with NRI: a plugin that stays connected to it, and updates outside of any event.

The runtime asks a plugin about each container while it makes it, and waits for the answer: a handler must
take far less than the runtime's request timeout (2 s unless configured). Then the runtime continues without
it. For a handler that raises or is too slow, the answer is "no change", and a line is logged.

`Runtime.UpdateContainers` is not offered: in containerd before 2.4 it can block the runtime for good when a
container event meets it (containerd/containerd issue 13733). Updates travel in answers. The answer to
Synchronize is applied under the locks in their safe order, so a second, short connection, the courier,
carries all other updates there. The runtime does not state whether they took effect: read the cgroups.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvplace.core.errors import KvplaceError, Misconfigured, Unavailable
from kvplace.nri.connection import Connection, UnknownMethod
from kvplace.nri.messages import (
    BadPeer,
    CallFailed,
    PluginCall,
    read_asked_cpuset,
    read_runtime,
    read_state_change,
    read_subject,
    read_synchronization,
    write_creation,
    write_registration,
    write_subscription,
    write_synchronized,
    write_updates,
)
from kvplace.nri.values import (
    ContainerUpdate,
    Cpuset,
    Creation,
    NriContainer,
    NriEvent,
    PodSandbox,
    Runtime,
)

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 30.0
"""From connecting to Synchronize. The runtime takes one plugin at a time and waits 5 s for a silent one."""
MAX_SYNCHRONIZED = 20_000
"""Most pods and containers that one runtime may announce."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_SHARE_OF_TIMEOUT = 0.75
"""The part of the runtime's request timeout that a handler may use."""
MAX_UPDATES = 50
"""Most updates of one connection: the runtime needs about 10 ms for each and creates no container then."""
_DELIVERY_TIMEOUT_S = 30.0

_EVENT_CALLS = {
    "RunPodSandbox": NriEvent.RUN_POD,
    "StopPodSandbox": NriEvent.STOP_POD,
    "RemovePodSandbox": NriEvent.REMOVE_POD,
    "PostCreateContainer": NriEvent.POST_CREATE,
    "StartContainer": NriEvent.START,
    "PostStartContainer": NriEvent.POST_START,
    "PostUpdateContainer": NriEvent.POST_UPDATE,
    "RemoveContainer": NriEvent.REMOVE,
}
"""Calls of NRI 0.12 that need no answer; older runtimes send StateChange instead."""

_T = TypeVar("_T")


class NriHandler(ABC):
    """A plugin: its name, and its answers to the runtime's calls.

    An answer that it does not define changes nothing.
    """

    name = "kvplace"
    index = "50"
    """Runtimes call plugins in the order of their index, which is two digits."""
    events: frozenset[NriEvent]
    """The events to be called for; not empty."""

    @abstractmethod
    async def synchronize(
        self, runtime: Runtime, pods: Sequence[PodSandbox], containers: Sequence[NriContainer]
    ) -> Sequence[ContainerUpdate]:
        """Learn all pods and containers, once for each connection, before any event; return updates."""

    async def create(self, pod: PodSandbox, container: NriContainer) -> Creation:
        """Decide about a container before it is created."""
        return Creation()

    async def update(
        self, pod: PodSandbox, container: NriContainer, asked: Cpuset
    ) -> Sequence[ContainerUpdate]:
        """Decide about a change that the kubelet or a person asks for; `asked` holds without an answer."""
        return ()

    async def stop(self, pod: PodSandbox, container: NriContainer) -> Sequence[ContainerUpdate]:
        """Learn that a container ends, perhaps not for the first time; return updates of others."""
        return ()

    async def observe(  # noqa: B027 - most need not know
        self, event: NriEvent, pod: PodSandbox, container: NriContainer
    ) -> None:
        """Learn of any other event; the container is empty where the event is about the pod."""

    def disconnected(self, reason: KvplaceError) -> None:  # noqa: B027 - most need not know
        """Learn that there is no runtime now; `synchronize` comes when there is one again."""


@dataclass
class NriRuntime:
    """The container runtime behind a socket."""

    socket: Path
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self, handler: NriHandler) -> None:
        """Keep a plugin connected until cancelled; pauses between attempts grow from 0.1 s to 2 s."""
        pause = _FIRST_PAUSE_S
        logged = ""
        while True:
            try:
                async with session(self.socket, handler) as connection:
                    pause, logged = _FIRST_PAUSE_S, ""
                    await connection.future()
            except (Unavailable, Misconfigured) as error:
                handler.disconnected(error)
                if str(error) != logged:
                    logged = str(error)
                    log.warning("%s; trying again every %g s at most", error, _LONGEST_PAUSE_S)
            await self.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def deliver(self, choose: Callable[[Sequence[NriContainer]], Sequence[ContainerUpdate]]) -> None:
        """Have the runtime update containers outside of any event, by a plugin that is connected for it.

        `choose` gets all containers with their specs of now, and returns at most MAX_UPDATES updates. Returns
        when the runtime has the answer; it needs about 10 ms more for each container in it. Raises
        Unavailable or Misconfigured.
        """
        try:
            async with (
                asyncio.timeout(_DELIVERY_TIMEOUT_S),
                session(self.socket, _Courier(choose)) as connection,
            ):
                # It reads our frames in their order: an answer to this shows that it has the one before. A
                # runtime that finds the connection closed may drop frames that it has not passed on yet.
                with suppress(CallFailed):
                    await connection.call("Ping", b"", timeout_s=_DELIVERY_TIMEOUT_S)
        except TimeoutError:
            limit = f"{_DELIVERY_TIMEOUT_S:g} s"
            raise Unavailable(f"the NRI runtime did not take updates within {limit}") from None


@asynccontextmanager
async def session(socket: Path, handler: NriHandler) -> AsyncIterator[Connection]:
    """Connect, register and synchronize; the handler is called for events until the body ends.

    Raises Unavailable or Misconfigured. The body learns from `connection.future()` that the runtime is gone.
    """
    connection = await Connection.open(socket)
    synchronized: asyncio.Future[None] = connection.future()
    calls = _Calls(handler, synchronized)
    serving = asyncio.create_task(connection.serve(calls.answer))
    try:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                registration = write_registration(handler.name, handler.index)
                await connection.call("RegisterPlugin", registration, timeout_s=HANDSHAKE_TIMEOUT_S)
                await synchronized
        except TimeoutError:
            limit = f"{HANDSHAKE_TIMEOUT_S:g} s"
            raise Unavailable(f"the NRI runtime did not synchronize the plugin in {limit}") from None
        yield connection
    finally:
        connection.close(Unavailable("the connection was closed by the agent"))
        serving.cancel()
        await asyncio.wait([serving])
        # The futures have raised its other errors.
        error = None if serving.cancelled() else serving.exception()
        if error is not None and not isinstance(error, Unavailable):
            log.error("a call of the NRI runtime could not be answered", exc_info=error)


class _Calls:
    """Answers the calls of one connection: Configure, Synchronize, then events."""

    def __init__(self, handler: NriHandler, synchronized: asyncio.Future[None]) -> None:
        self._handler = handler
        self._runtime = Runtime("", "")
        self._pods: list[PodSandbox] = []
        self._containers: list[NriContainer] = []
        self._synchronized = synchronized

    async def answer(self, call: PluginCall) -> bytes:
        method, payload = call.method, call.payload
        match method:
            case "Configure":
                return self._configure(payload)
            case "Synchronize":
                return await self._synchronize(payload)
            case "CreateContainer":
                creation = self._handler.create(*read_subject(payload))
                return write_creation(await self._in_time(method, creation, Creation()))
            case "UpdateContainer":
                updates = self._handler.update(*read_subject(payload), read_asked_cpuset(payload))
                return write_updates(await self._in_time(method, updates, ()))
            case "StopContainer":
                updates = self._handler.stop(*read_subject(payload))
                return write_updates(await self._in_time(method, updates, ()))
            case "StateChange":
                event, pod, container = read_state_change(payload)
                if event is not None:
                    await self._observe(event, pod, container)
                return b""
            case "Shutdown":
                return b""
        if method not in _EVENT_CALLS:
            raise UnknownMethod
        await self._observe(_EVENT_CALLS[method], *read_subject(payload))
        return b""

    def _configure(self, payload: bytes) -> bytes:
        self._runtime = read_runtime(payload)
        return write_subscription(self._handler.events)

    async def _synchronize(self, payload: bytes) -> bytes:
        announced_pods, announced, more = read_synchronization(payload)
        self._pods += announced_pods
        self._containers += announced
        if len(self._pods) + len(self._containers) > MAX_SYNCHRONIZED:
            raise BadPeer(f"the NRI runtime announced more than {MAX_SYNCHRONIZED} pods and containers")
        if more:
            return write_synchronized((), more=True)
        pods, self._pods = self._pods, []
        containers, self._containers = self._containers, []
        answer = self._handler.synchronize(self._runtime, pods, containers)
        updates = await self._in_time("Synchronize", answer, ())
        if not self._synchronized.done():
            self._synchronized.set_result(None)
        return write_synchronized(updates, more=False)

    async def _observe(self, event: NriEvent, pod: PodSandbox, container: NriContainer) -> None:
        await self._in_time(event.name, self._handler.observe(event, pod, container), None)

    async def _in_time(self, what: str, answer: Awaitable[_T], no_change: _T) -> _T:
        """Wait for a handler, but not until the runtime gives up on us."""
        limit = self._runtime.request_timeout_s * _SHARE_OF_TIMEOUT
        try:
            async with asyncio.timeout(limit):
                return await answer
        except TimeoutError:
            log.error("no decision on %s within %g s; answered with no change", what, limit)
        except Exception:
            log.exception("%s failed; answered with no change", what)
        return no_change


class _Courier(NriHandler):
    """A plugin that wants nothing but its updates."""

    name = "kvplace-courier"
    """Not that of the plugin that answers for new containers."""
    index = "99"
    events = frozenset({NriEvent.REMOVE_POD})  # the rarest; none would mean all

    def __init__(self, choose: Callable[[Sequence[NriContainer]], Sequence[ContainerUpdate]]) -> None:
        self._choose = choose

    async def synchronize(
        self, runtime: Runtime, pods: Sequence[PodSandbox], containers: Sequence[NriContainer]
    ) -> Sequence[ContainerUpdate]:
        return self._choose(containers)[:MAX_UPDATES]
