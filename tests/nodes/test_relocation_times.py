"""A VM that has just got other cores is left in peace for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvplace.core.ledger import Ledger, Relocation
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NodeName, PodUid
from kvplace.nodes.node_cache import PAUSE_AFTER_EDIT_S, PEACE_S, RelocationTimes
from tests.kube.example_claims import claim
from tests.virtual_time import JumpingLoop

NODE, VM, OTHER = NodeName("n"), PodUid("vm"), PodUid("other")
MOVING = Relocation(PodPlacement.floating(pod_uid=VM, node=NODE), None)


class Followed:
    """The ledger of one node, and what follows it."""

    def __init__(self) -> None:
        self.record: Any = None
        ledgers: Any = SimpleNamespace(subscribe=self._subscribe, current=lambda _node: self.record)
        self.times = RelocationTimes(ledgers)

    def _subscribe(self, listener: Any) -> None:
        self._listener = listener

    def holds(self, relocation: Relocation | None, uid: PodUid = VM) -> None:
        """Let the ledger have the VM's claim like this."""
        claims = {uid: replace(claim(uid, 1), relocation=relocation)}
        self.record = SimpleNamespace(ledger=Ledger({}, claims))
        self._listener(NODE)

    def rests(self) -> tuple[float, float]:
        """For how long the VM is still left in peace by its own owner, and by others."""
        return tuple(self.times.rest_s(VM, peace) for peace in (PAUSE_AFTER_EDIT_S, PEACE_S))  # type: ignore[return-value]


@pytest.fixture
def loop() -> Iterator[JumpingLoop]:
    made = JumpingLoop()
    yield made
    made.finish()


def run(loop: JumpingLoop, story: Coroutine[Any, Any, None]) -> None:
    loop.run(story)


def test_it_rests_from_the_end_of_its_relocation(loop: JumpingLoop) -> None:
    async def story() -> None:
        followed = Followed()
        followed.holds(None)
        assert followed.rests() == (0, 0)
        followed.holds(MOVING)
        await asyncio.sleep(100)
        followed.holds(MOVING)  # it took its time
        followed.holds(None)
        assert followed.rests() == (PAUSE_AFTER_EDIT_S, PEACE_S)
        await asyncio.sleep(PAUSE_AFTER_EDIT_S)
        followed.holds(None)
        assert followed.rests() == (0, PEACE_S - PAUSE_AFTER_EDIT_S)
        await asyncio.sleep(PEACE_S)
        assert followed.rests() == (0, 0)

    run(loop, story())


def test_times_that_no_longer_matter_are_forgotten(loop: JumpingLoop) -> None:
    async def story() -> None:
        followed = Followed()
        followed.holds(MOVING)
        assert followed.times._seen.keys() == {VM}
        await asyncio.sleep(PEACE_S)
        followed.holds(MOVING, uid=OTHER)
        assert followed.times._seen.keys() == {OTHER}

    run(loop, story())
