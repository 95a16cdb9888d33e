"""What lies between a process and the API server: calls fail, arrive late or twice, and watches lag."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any, TypeVar

from kvplace.core.errors import Conflict, Forbidden, KvplaceError, Unavailable
from kvplace.core.ledger import LedgerChange
from kvplace.kube.api_errors import ApiUnavailable
from kvplace.kube.watches import EVERYTHING, Kind, Selector, WatchEvent
from tests.kube.faults import FaultScript, Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.protocol.diary import Diary
from tests.protocol.faults import LATE_S, PAUSES_S, SLOW_S, FaultMix

K = TypeVar("K")
R = TypeVar("R")

_READS = {Operation.READ_POD, Operation.READ_VMI, Operation.READ_LEDGER}
_UNDISTURBED = {Operation.RECORD_EVENT, Operation.ANNOTATE_NODE, Operation.SET_POD_CONDITION}
"""Writes that no promise is about."""


class Network:
    """The faults of a story, and the requests that are still on their way when nobody waits for them."""

    def __init__(self, random: Random, mix: FaultMix, diary: Diary) -> None:
        self.mix = mix
        self.calm = False
        """Whether calls are quick and succeed from now on."""
        self._diary = diary
        self._random = random
        self._under_way: set[asyncio.Task[None]] = set()

    def pause(self) -> float:
        """Return how long something takes: mostly moments, sometimes seconds."""
        if self.calm:
            return 0.0
        if self._random.random() < self.mix.slow:
            return self._random.choice(SLOW_S)
        return self._random.choice(PAUSES_S)

    async def take_time(self) -> None:
        """Wait for such a pause."""
        seconds = self.pause()
        if seconds:
            await asyncio.sleep(seconds)

    def send_late(self, effect: Callable[[], Awaitable[object]], what: tuple[str, str]) -> None:
        """Let a request take effect later, though nobody waits for its answer."""

        async def arrive() -> None:
            await asyncio.sleep(self._random.uniform(0.0, LATE_S))
            with contextlib.suppress(KvplaceError):
                await effect()
                self._diary.step(*what)

        task = asyncio.get_running_loop().create_task(arrive())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def _sender_gone(
        self, view: View, effect: Callable[[], Awaitable[object]], what: tuple[str, str]
    ) -> None:
        """Let the request of a process that was killed arrive all the same, or not."""
        if view.is_dead and self._random.random() < 0.5:
            self.send_late(effect, what)

    async def drain(self) -> None:
        """Wait until every request has arrived."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def carry(
        self, view: View, operation: Operation, effect: Callable[[], Awaitable[R]], target: str
    ) -> R:
        """Carry one call of a process."""
        if view.is_dead or (view.is_cut_off and not self.calm):
            raise Unavailable(f"{operation.value}: no route to host")
        if self.calm or operation in _UNDISTURBED:
            return await effect()
        what = (view.process, f"{operation.value} {target}")
        is_read = operation in _READS
        try:
            await self.take_time()
        except asyncio.CancelledError:
            if not is_read:
                self._sender_gone(view, effect, what)
            raise
        mix, fate = self.mix, self._random.random()
        if fate < mix.refused:
            raise ApiUnavailable(f"{operation.value}: refused", status=429, retry_after=1.0, untouched=True)
        fate -= mix.refused
        if not is_read:
            if fate < mix.conflicts:
                raise Conflict(f"{operation.value}: 409")
            fate -= mix.conflicts
            if fate < mix.forbidden:
                raise Forbidden(f"{operation.value}: 403")
            fate -= mix.forbidden
            if fate < mix.late:
                self.send_late(effect, what)
                raise Unavailable(f"{operation.value}: no answer yet")
            fate -= mix.late
            if fate < mix.doubled:
                with contextlib.suppress(KvplaceError):
                    await effect()
                    self._diary.step(*what)
            fate -= mix.doubled
        answer = await effect()
        self._diary.step(*what)
        await self.take_time()
        if fate < mix.lost:
            raise Unavailable(f"{operation.value}: the answer was lost")
        return answer


class Undisturbed(FaultScript):
    """No faults of the cluster's own: the network has them all."""

    def around(self, operation: Operation) -> contextlib.nullcontext[None]:  # type: ignore[override]
        return contextlib.nullcontext()


class View(FaultyCluster):
    """The cluster as one process sees it: its calls go through the network, its watches lag behind."""

    def __init__(self, cluster: FaultyCluster, process: str, network: Network, random: Random) -> None:
        self.__dict__ |= cluster.__dict__
        self.process = process
        self.is_dead = False
        """Whether the process was killed: nothing that it still does counts."""
        self.is_cut_off = False
        """Whether nothing of it gets through."""
        self.network = network
        self._random = random
        self._stalled: dict[str, asyncio.Event] = {}

    def stall(self, kind: Kind[Any, Any]) -> None:
        """Deliver nothing of a kind to this process until `resume`."""
        self._stalled.setdefault(kind.name, asyncio.Event())

    def resume(self) -> None:
        """Deliver everything again."""
        for event in self._stalled.values():
            event.set()
        self._stalled.clear()

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        return self._late(super().watch(kind, selector), kind.name)

    async def _late(self, events: AsyncIterator[WatchEvent[R]], kind: str) -> AsyncIterator[WatchEvent[R]]:
        async for event in events:
            while (stalled := self._stalled.get(kind)) is not None:
                await stalled.wait()
            if self._random.random() < self.network.mix.stale:
                await self.network.take_time()
            yield event


def _target(args: tuple[Any, ...]) -> str:
    """Name the pod or node that a call is about, and what it would change there."""
    if len(args) > 1 and isinstance(args[1], LedgerChange):
        changes = [f"+{claim.pod}" for claim in args[1].claims]
        changes += [f"-{args[0].ledger.claims[uid].pod}" for uid in args[1].releases]
        return f"{args[0].node} {' '.join(changes)}"
    if len(args) > 1 and isinstance(args[1], str):
        return args[1]
    return str(getattr(args[0], "node", args[0]))


def _through_the_network(operation: Operation) -> Callable[..., Awaitable[Any]]:
    carried_out: Callable[..., Awaitable[Any]] = getattr(FaultyCluster, operation.value)

    async def call(self: View, *args: Any) -> Any:
        return await self.network.carry(self, operation, lambda: carried_out(self, *args), _target(args))

    return call


for _operation in Operation:
    setattr(View, _operation.value, _through_the_network(_operation))
