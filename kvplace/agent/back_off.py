"""How often the agent tries: repairs that others undo, and deliveries to receivers that are slow or down.

Repairs without end would use a CPU for nothing and move a VM's threads every second. So after MOST_REPAIRS
within a period there is one try in each period, until a repair has lasted for one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvplace.core.errors import KvplaceError, Refused
from kvplace.core.scalars import PodUid

MOST_REPAIRS = 5
"""With so many repairs within PERIOD_S the agent gives up."""
PERIOD_S = 60.0


@dataclass(frozen=True, slots=True)
class RepairHistory:
    """The repairs of one thing within the last period; times are seconds of a monotonic clock."""

    repairs: tuple[float, ...] = ()
    """When they were made."""
    given_up: bool = False

    def may_repair(self, now: float) -> bool:
        """Whether drift is to be repaired now."""
        return not self.given_up or now - self.repairs[-1] >= PERIOD_S

    def repaired(self, now: float) -> RepairHistory:
        """Take a repair into account."""
        recent = (*(moment for moment in self.repairs if now - moment < PERIOD_S), now)
        return RepairHistory(recent, self.given_up or len(recent) >= MOST_REPAIRS)

    def intact(self, now: float) -> RepairHistory:
        """Take into account that nothing differs."""
        if self.repairs and now - self.repairs[-1] >= PERIOD_S:
            return RepairHistory()
        return self


log = logging.getLogger(__name__)

AGAIN_S = 30.0
"""Pause before the second attempt of a delivery; it doubles with each further one."""
LONGEST_S = 600.0
"""Longest time between two tries."""
BURST_S = 50.0
"""A pod may have so much more than its share of the time."""
LEAST_CHARGE_S = 10.0
_SHARE = 10
"""One pod gets at most 1 / _SHARE of the time for deliveries: a tenant may change its value at will, and may
control its receiver."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Due(Generic[T]):
    value: T
    at: float
    pause: float
    """Seconds until it is tried again if it is not taken."""


class Deliveries(Generic[T]):
    """One delivery at a time; a value that is replaced before its turn is never delivered.

    Every pod has its turn. New values for one pod are delivered at once up to six times, or once where that
    takes 5 s or more; then 10 s apart and for a tenth of the time.
    """

    def __init__(
        self,
        deliver: Callable[[PodUid, T], Awaitable[None]],
        *,
        again_s: float = AGAIN_S,
        longest_s: float = LONGEST_S,
    ) -> None:
        """`deliver` raises Refused to end the attempts, and another KvplaceError to be called again."""
        self._deliver = deliver
        self._again_s = again_s
        self._longest_s = longest_s
        self._due: dict[PodUid, _Due[T]] = {}
        self._used: dict[PodUid, float] = {}
        """Until when the deliveries of a pod would have lasted at its share of the time."""
        self._delivered: _Due[T] | None = None
        """The delivery that is under way."""
        self._changed = asyncio.Event()

    def put(self, uid: PodUid, value: T, *, undone: bool = False) -> None:
        """Deliver a value soon, instead of any other for the same pod.

        The same value again does not shorten the time until a failed delivery is tried again. If its effect
        was undone, it is delivered once more after a delivery that is under way.
        """
        due = self._due.get(uid)
        if due is None or due.value != value or (undone and due is self._delivered):
            self._due[uid] = _Due(value, self._earliest(uid), self._again_s)
            self._changed.set()

    def drop(self, uid: PodUid) -> None:
        """Forget the pending delivery of a pod."""
        self._due.pop(uid, None)

    async def run(self) -> None:
        """Deliver until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            for uid, due in list(self._due.items()):
                if due.at <= loop.time() and self._due.get(uid) is due:
                    await self._try(uid, due)
            earliest = min((due.at for due in self._due.values()), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(earliest):
                    await self._changed.wait()

    async def _try(self, uid: PodUid, due: _Due[T]) -> None:
        loop = asyncio.get_running_loop()
        again, began = None, loop.time()
        self._delivered = due
        try:
            await self._deliver(uid, due.value)
        except Refused as error:
            log.info("not delivered: %s", error, extra={"uid": uid})
        except KvplaceError as error:
            log.warning("tried again in %g s: %s", due.pause, error, extra={"uid": uid})
            again = _Due(due.value, loop.time() + due.pause, min(due.pause * 2, self._longest_s))
        self._delivered = None
        self._charge(uid, began, loop.time())
        newest = self._due.pop(uid, None)
        if newest is not None and newest is not due and (again is None or newest.value != due.value):
            again = replace(newest, at=self._earliest(uid))
        if again is not None and newest is not None:
            self._due[uid] = again

    def _charge(self, uid: PodUid, began: float, now: float) -> None:
        self._used = {pod: until for pod, until in self._used.items() if until > now}
        charge = max(LEAST_CHARGE_S, (now - began) * _SHARE)
        self._used[uid] = max(self._used.get(uid, 0.0), now) + charge

    def _earliest(self, uid: PodUid) -> float:
        """State when the next delivery of a pod may be made."""
        return self._used.get(uid, 0.0) - BURST_S
