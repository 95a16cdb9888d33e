"""The newest value of each pod reaches its reader, and repairs are retried and given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.agent.back_off import MOST_REPAIRS, PERIOD_S, Deliveries, RepairHistory
from kvplace.core.errors import Refused, Unavailable
from kvplace.core.scalars import PodUid

A, B = PodUid("a"), PodUid("b")


class Receiver:
    """Takes values, after the errors it was configured to raise."""

    def __init__(self) -> None:
        self.taken: list[tuple[PodUid, int]] = []
        self.errors: list[Exception] = []
        self.open = asyncio.Event()
        self.open.set()
        self.asked = asyncio.Semaphore(0)

    async def take(self, uid: PodUid, value: int) -> None:
        self.asked.release()
        await self.open.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append((uid, value))

    async def asked_times(self, count: int) -> None:
        for _ in range(count):
            await self.asked.acquire()


@asynccontextmanager
async def running(deliveries: Deliveries[int]) -> AsyncIterator[None]:
    task = asyncio.create_task(deliveries.run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_the_same_value_again_does_not_hasten_a_failed_delivery() -> None:
    receiver = Receiver()
    receiver.errors = [Unavailable("away")]
    deliveries = Deliveries(receiver.take, again_s=60)
    async with running(deliveries):
        deliveries.put(A, 1)
        await receiver.asked_times(1)
        for _ in range(3):
            await asyncio.sleep(0)
            deliveries.put(A, 1)
        deliveries.put(B, 9)
        await receiver.asked_times(1)
        assert receiver.taken == [(B, 9)]
        deliveries.put(A, 2)
        await receiver.asked_times(1)
    assert receiver.taken == [(B, 9), (A, 2)]


async def test_a_value_that_was_undone_during_its_delivery_is_delivered_once_more() -> None:
    receiver = Receiver()
    receiver.open.clear()
    deliveries = Deliveries(receiver.take)
    async with running(deliveries):
        deliveries.put(A, 1)
        await receiver.asked_times(1)
        deliveries.put(A, 1)
        deliveries.put(A, 1, undone=True)
        receiver.open.set()
        await receiver.asked_times(1)
        await asyncio.sleep(0)
    assert receiver.taken == [(A, 1), (A, 1)]


async def test_an_undone_value_does_not_hasten_its_failed_delivery() -> None:
    receiver = Receiver()
    receiver.errors = [Unavailable("away")]
    receiver.open.clear()
    deliveries = Deliveries(receiver.take, again_s=60)
    async with running(deliveries):
        deliveries.put(A, 1)
        await receiver.asked_times(1)
        deliveries.put(A, 1, undone=True)
        receiver.open.set()
        deliveries.put(B, 9)
        await receiver.asked_times(1)
        await asyncio.sleep(0)
    assert receiver.taken == [(B, 9)]


async def test_a_value_that_is_replaced_before_its_turn_is_not_delivered() -> None:
    receiver = Receiver()
    deliveries = Deliveries(receiver.take)
    receiver.open.clear()
    async with running(deliveries):
        deliveries.put(A, 1)
        await receiver.asked_times(1)
        deliveries.put(A, 2)
        deliveries.put(A, 3)
        deliveries.put(B, 9)
        receiver.open.set()
        await receiver.asked_times(2)
    assert sorted(receiver.taken) == [(A, 1), (A, 3), (B, 9)]


async def test_a_value_that_was_not_taken_is_tried_again_and_does_not_delay_others() -> None:
    receiver = Receiver()
    receiver.errors = [Unavailable("away")]
    deliveries = Deliveries(receiver.take, again_s=0.05)
    async with running(deliveries):
        deliveries.put(A, 1)
        deliveries.put(B, 2)
        await receiver.asked_times(3)
    assert receiver.taken == [(B, 2), (A, 1)]


async def test_each_pause_is_twice_the_one_before() -> None:
    receiver = Receiver()
    receiver.errors = [Unavailable("away") for _ in range(3)]
    deliveries = Deliveries(receiver.take, again_s=0.05)
    began = asyncio.get_running_loop().time()
    async with running(deliveries):
        deliveries.put(A, 1)
        await receiver.asked_times(4)
    assert receiver.taken == [(A, 1)]
    assert asyncio.get_running_loop().time() - began == pytest.approx(0.05 + 0.1 + 0.2)


async def test_no_pause_is_longer_than_the_longest() -> None:
    receiver = Receiver()
    receiver.errors = [Unavailable("away") for _ in range(12)]
    deliveries = Deliveries(receiver.take, again_s=0.01, longest_s=0.02)
    began = asyncio.get_running_loop().time()
    async with running(deliveries):
        deliveries.put(A, 1)
        await receiver.asked_times(13)
    assert receiver.taken == [(A, 1)]
    assert asyncio.get_running_loop().time() - began == pytest.approx(0.01 + 11 * 0.02)


async def test_a_refused_or_dropped_value_is_not_tried_again() -> None:
    receiver = Receiver()
    receiver.errors = [Refused("gone"), Unavailable("away")]
    deliveries = Deliveries(receiver.take, again_s=0)
    async with running(deliveries):
        deliveries.put(A, 1)
        await receiver.asked_times(1)
        receiver.open.clear()
        deliveries.put(B, 2)
        await receiver.asked_times(1)
        deliveries.drop(B)
        receiver.open.set()
        deliveries.put(A, 3)
        await receiver.asked_times(1)
    assert receiver.taken == [(A, 3)]


async def test_a_newer_value_is_delivered_at_once_after_a_failure() -> None:
    receiver = Receiver()
    receiver.errors = [Unavailable("away")]
    deliveries = Deliveries(receiver.take, again_s=3600)
    async with running(deliveries):
        deliveries.put(A, 1)
        await receiver.asked_times(1)
        deliveries.put(A, 2)
        await receiver.asked_times(1)
    assert receiver.taken == [(A, 2)]


async def test_a_pod_whose_value_changes_all_the_time_has_no_more_than_its_share() -> None:
    receiver = Receiver()
    deliveries = Deliveries(receiver.take)
    async with running(deliveries):
        for value in range(100):
            deliveries.put(A, value)
            for _ in range(5):
                await asyncio.sleep(0)
        deliveries.put(B, 9)
        await receiver.asked_times(1 + 6)
    assert receiver.taken == [*((A, value) for value in range(6)), (B, 9)]


async def test_one_that_takes_long_waits_for_its_share_whatever_its_value() -> None:
    receiver = Receiver()
    deliveries = Deliveries(receiver.take)
    receiver.errors = [Unavailable("did not answer within 5 s")]
    loop, moments = asyncio.get_running_loop(), iter(range(0, 10_000, 6))
    with pytest.MonkeyPatch.context() as patch:
        async with running(deliveries):
            real = loop.time
            patch.setattr(loop, "time", lambda: real() + next(moments))  # 6 s later at each check
            deliveries.put(A, 1)
            await receiver.asked_times(1)
            patch.undo()
            deliveries.put(A, 2)
            deliveries.put(B, 9)
            await receiver.asked_times(1)
            await asyncio.sleep(0)
    assert receiver.taken == [(B, 9)]


def test_a_few_repairs_are_made_at_once() -> None:
    history = RepairHistory()
    for moment in range(MOST_REPAIRS):
        assert history.may_repair(moment)
        history = history.repaired(moment)
    assert history.given_up


def test_after_too_many_it_is_tried_once_in_a_period_until_a_repair_lasts() -> None:
    history = RepairHistory()
    for moment in range(MOST_REPAIRS):
        history = history.repaired(moment)
    last = MOST_REPAIRS - 1
    assert not history.may_repair(last + PERIOD_S - 1)
    assert history.may_repair(last + PERIOD_S)
    history = history.repaired(last + PERIOD_S)
    assert not history.may_repair(last + PERIOD_S + 1)
    assert history.intact(last + PERIOD_S + 1).given_up
    assert history.intact(last + 2 * PERIOD_S) == RepairHistory()


def test_rare_repairs_never_add_up() -> None:
    history = RepairHistory()
    for moment in range(0, 10_000, int(PERIOD_S / (MOST_REPAIRS - 1)) + 1):
        assert history.may_repair(moment)
        history = history.repaired(moment)
    assert not history.given_up


@given(st.lists(st.tuples(st.floats(0.1, 100), st.booleans()), max_size=200))
def test_there_are_never_more_repairs_than_the_rule_allows(looks: list[tuple[float, bool]]) -> None:
    now, history, made = 0.0, RepairHistory(), list[float]()
    for pause, undone in looks:
        now += pause
        if not undone:
            history = history.intact(now)
        elif history.may_repair(now):
            history = history.repaired(now)
            made.append(now)
    for moment in made:
        assert sum(moment <= other < moment + PERIOD_S for other in made) <= MOST_REPAIRS
