"""The way between a process and the API server: calls fail, arrive late or twice, and watches lag."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from kvplace.core.errors import Conflict, Forbidden, KvplaceError, Unavailable
from kvplace.core.ledger import LedgerChange
from kvplace.core.scalars import PodUid
from kvplace.kube.api_errors import ApiUnavailable
from kvplace.kube.watches import EVERYTHING, Kind, Selector, WatchEvent
from tests.kube.faults import FaultScript, Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.protocol.faults import LATE_S, PAUSES_S, SLOW_S, FaultMix
from tests.protocol.run_counts import Diary

K = TypeVar("K")
R = TypeVar("R")

_READS = {Operation.READ_ALL, Operation.READ_POD, Operation.READ_VMI, Operation.READ_LEDGER}
_UNDISTURBED = {Operation.RECORD_EVENT, Operation.ANNOTATE_NODE, Operation.SET_POD_CONDITION}
"""Writes that no promise is about."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a process to the API server."""

    process: str
    operation: Operation
    effect: Callable[[], Awaitable[Any]]
    target: str
    pods: Collection[PodUid] = ()
    """The pods whose claims it releases, or that it gives another placement."""


class Network:
    """The faults of a story, and the requests that are still on their way when no VM waits for them."""

    def __init__(self, random: Random, mix: FaultMix, diary: Diary) -> None:
        self.mix = mix
        self.calm = False
        """Whether calls are quick and succeed from now on."""
        self._diary = diary
        self._random = random
        self._under_way: set[asyncio.Task[None]] = set()
        self._parting: Counter[PodUid] = Counter()
        """How many calls that may still take effect release a pod's claim or replace its placement."""

    def may_part(self, uid: PodUid) -> bool:
        """Whether a call may still take effect after which the pod's claim and its placement differ.

        Its process may be dead. A call that replaces the placement follows one that has stored the claim.
        """
        return self._parting[uid] > 0

    def pause(self) -> float:
        """Return how long something takes: mostly moments, sometimes seconds."""
        if self.calm:
            return 0.0
        if self._random.random() < self.mix.slow:
            return self._random.choice(SLOW_S)
        return self._random.choice(PAUSES_S)

    async def lag(self) -> None:
        """Hold up an event of a watch."""
        self._diary.count("event late")
        await self.take_time()

    async def take_time(self) -> None:
        """Wait for such a pause."""
        seconds = self.pause()
        if seconds:
            await asyncio.sleep(seconds)

    def _send_late(self, call: _Call) -> None:
        """Let a call take effect later, though no VM waits for its answer."""

        async def arrive() -> None:
            await asyncio.sleep(self._random.uniform(0.0, LATE_S))
            with contextlib.suppress(KvplaceError):
                await self._take_effect(call)

        def arrived(task: asyncio.Task[None]) -> None:
            self._under_way.discard(task)
            self._parting.subtract(call.pods)

        self._parting.update(call.pods)
        task = asyncio.get_running_loop().create_task(arrive())
        self._under_way.add(task)
        task.add_done_callback(arrived)

    async def _take_effect(self, call: _Call) -> Any:
        answer = await call.effect()
        self._diary.step(call.process, f"{call.operation.value} {call.target}")
        return answer

    async def drain(self) -> None:
        """Wait until every request has arrived."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def carry(self, view: View, call: _Call) -> Any:
        """Carry one call of a process."""
        if view.is_dead or (view.is_cut_off and not self.calm):
            raise Unavailable(f"{call.operation.value}: no route to host")
        if self.calm or call.operation in _UNDISTURBED:
            return await call.effect()
        self._parting.update(call.pods)
        try:
            return await self._carry_disturbed(view, call)
        finally:
            self._parting.subtract(call.pods)

    async def _carry_disturbed(self, view: View, call: _Call) -> Any:
        name, is_read = call.operation.value, call.operation in _READS
        try:
            await self.take_time()
        except asyncio.CancelledError:
            if not is_read and view.is_dead and self._random.random() < 0.5:
                self._send_late(call)
            raise
        mix, fate = self.mix, self._random.random()
        if fate < mix.refused:
            self._diary.count("429")
            raise ApiUnavailable(f"{name}: refused", status=429, retry_after=1.0, untouched=True)
        fate -= mix.refused
        if not is_read:
            if fate < mix.conflicts:
                self._diary.count("409")
                raise Conflict(f"{name}: 409")
            fate -= mix.conflicts
            if fate < mix.forbidden:
                self._diary.count("403")
                raise Forbidden(f"{name}: 403")
            fate -= mix.forbidden
            if fate < mix.late:
                self._diary.count("write late")
                self._send_late(call)
                raise Unavailable(f"{name}: no answer yet")
            fate -= mix.late
            if fate < mix.doubled:
                self._diary.count("write doubled")
                with contextlib.suppress(KvplaceError):
                    await self._take_effect(call)
            fate -= mix.doubled
        answer = await self._take_effect(call)
        await self.take_time()
        if 0.0 <= fate < mix.lost:
            self._diary.count("answer lost")
            raise Unavailable(f"{name}: the answer was lost")
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
                await self.network.lag()
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


def _pods(operation: Operation, args: tuple[Any, ...]) -> Collection[PodUid]:
    """Return the pods whose claims a call releases, or that it gives another placement."""
    match operation, args:
        case Operation.WRITE_LEDGER, (_, LedgerChange() as change, *_):
            return change.releases
        case Operation.REPLACE_PLACEMENT, (_, _, uid, *_):
            return (uid,)
        case _:
            return ()


def _through_the_network(operation: Operation) -> Callable[..., Awaitable[Any]]:
    carried_out: Callable[..., Awaitable[Any]] = getattr(FaultyCluster, operation.value)

    async def call(self: View, *args: Any, **options: Any) -> Any:
        effect = functools.partial(carried_out, self, *args, **options)
        one = _Call(self.process, operation, effect, _target(args), _pods(operation, args))
        return await self.network.carry(self, one)

    return call


for _operation in Operation:
    setattr(View, _operation.value, _through_the_network(_operation))
