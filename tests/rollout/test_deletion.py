"""Deleting a rollout."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pytest

from harness.waiting import PATIENCE_S
from kvplace.core.errors import Absent, Unavailable
from kvplace.kube.watches import EVERYTHING, Kind, Selector
from tests.rollout.examples import rollout, rollouts_of
from tests.rollout.memory_rollouts import MemoryRollouts

K = TypeVar("K")
R = TypeVar("R")


async def test_a_deletion_reports_the_remaining_vms_and_ends_when_the_last_pod_has_ended() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    await rollouts.create(await rollouts.prepare(rollout(until="created")))
    cluster.pods_linger = True
    told: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    deleting = asyncio.create_task(
        rollouts.delete("web", on_change=lambda left, of: told.put_nowait((left, of)))
    )
    async with asyncio.timeout(PATIENCE_S):
        assert await told.get() == (0, 6)
        assert not deleting.done()
        cluster.end_pods()
        assert await deleting == 6
    assert await rollouts.names() == ()


@pytest.mark.parametrize("name", ["web,tier=db", "web,!app", "", "Web"])
async def test_an_invalid_name_of_a_rollout_selects_no_vms(name: str) -> None:
    class Listed(MemoryRollouts):
        async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
            raise AssertionError(f"VMs were selected by {selector}")

    with pytest.raises(Absent, match="has no rollout"):
        await rollouts_of(Listed()).delete(name)


async def test_a_deletion_that_takes_too_long_names_the_remaining_vms() -> None:
    cluster = MemoryRollouts()
    rollouts = rollouts_of(cluster)
    await rollouts.create(await rollouts.prepare(rollout(until="created")))
    cluster.pods_linger = True
    with pytest.raises(Unavailable, match=r"rollout 'web' still has 6 pods of its VMs; run delete again"):
        await rollouts.delete("web", timeout_s=0.2)
    assert await rollouts.names() == ("web",)
