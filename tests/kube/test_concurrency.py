"""Calls at the same time end together, whatever becomes of them."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.core.errors import Conflict, KvplaceError, Unavailable
from kvplace.kube.concurrency import all_ended


async def fail(error: Exception) -> None:
    raise error


async def test_when_one_fails_the_others_come_to_their_end_first() -> None:
    goes_on, ended = asyncio.Event(), list[str]()

    async def slow() -> None:
        await goes_on.wait()
        ended.append("slow")

    waiting = asyncio.ensure_future(all_ended(fail(Unavailable("no answer")), slow()))
    asyncio.get_running_loop().call_soon(goes_on.set)
    with pytest.raises(Unavailable):
        await waiting
    assert ended == ["slow"]


async def test_the_first_error_is_raised_but_a_mistake_of_ours_before_it() -> None:
    errors: list[Exception] = [Unavailable("no answer"), Conflict("changed"), KeyError("ours")]
    with pytest.raises(KvplaceError, match="no answer"):
        await all_ended(*(fail(error) for error in errors[:2]))
    with pytest.raises(KeyError):
        await all_ended(*(fail(error) for error in errors))


async def test_who_gives_it_up_ends_all() -> None:
    ended = list[int]()

    async def endless(number: int) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(number)

    begun = asyncio.ensure_future(all_ended(endless(1), endless(2)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    assert sorted(ended) == [1, 2]
