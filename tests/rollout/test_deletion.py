"""Deleting a rollout."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.core.errors import Unavailable
from tests.rollout.examples import rollout, rollouts_of
from tests.rollout.memory_rollouts import MemoryRollouts


async def test_a_deletion_tells_what_is_left_and_ends_when_the_last_pod_has_ended() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    await rollouts.create(await rollouts.prepare(rollout(until="created")))
    cluster.pods_linger = True
    told: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    deleting = asyncio.create_task(
        rollouts.delete("web", on_change=lambda left, of: told.put_nowait((left, of)))
    )
    async with asyncio.timeout(30):
        assert await told.get() == (0, 6)
        assert not deleting.done()
        cluster.end_pods()
        assert await deleting == 6
    assert await rollouts.names() == ()


async def test_a_deletion_that_takes_too_long_says_what_is_left() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    await rollouts.create(await rollouts.prepare(rollout(until="created")))
    cluster.pods_linger = True
    with pytest.raises(Unavailable, match=r"rollout 'web' still has 6 pods of its VMs; delete it again"):
        await rollouts.delete("web", timeout_s=0.2)
    assert await rollouts.names() == ("web",)
