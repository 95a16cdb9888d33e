"""Full garbage collections hold up nobody who waits for an answer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from harness.certificates import Certificates
from kvplace.serve.full_collections import LATEST_S, QUIET_S, collect_while_quiet
from kvplace.serve.process import serving
from tests.kube.faulty_cluster import FaultyCluster
from tests.serve.served import settings_for
from tests.virtual_time import JumpingLoop


@dataclass
class Collector:
    """Stands for Python's collector: notes when full collections begin, and says how much is to be done."""

    monkeypatch: pytest.MonkeyPatch
    calls: int = 0
    middle_since_full: int = 1_000
    begun: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.monkeypatch.setattr(gc, "get_count", lambda: (0, 0, self.middle_since_full))
        self.monkeypatch.setattr(gc, "collect", lambda: self.begun.append(asyncio.get_running_loop().time()))

    async def busy(self, seconds: float) -> None:
        """Let calls come all the time."""
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            self.calls += 1
            await asyncio.sleep(QUIET_S / 2)

    async def while_collecting(self, *, busy: float = 0.0, quiet: float = 0.0) -> None:
        work = asyncio.create_task(collect_while_quiet(lambda: self.calls))
        await asyncio.sleep(0)
        await self.busy(busy)
        await asyncio.sleep(quiet)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    return Collector(monkeypatch)


@pytest.fixture
def loop() -> Iterator[JumpingLoop]:
    loop = JumpingLoop()
    yield loop
    loop.close()


def test_none_begins_while_calls_come_and_one_when_they_end(collector: Collector, loop: JumpingLoop) -> None:
    loop.run(collector.while_collecting(busy=100.0))
    assert collector.begun == []
    loop.run(collector.while_collecting(busy=100.0, quiet=2 * QUIET_S + 0.1))
    assert collector.begun


def test_none_begins_where_nothing_has_grown_old(collector: Collector, loop: JumpingLoop) -> None:
    collector.middle_since_full = 1
    loop.run(collector.while_collecting(quiet=100.0))
    assert collector.begun == []


def test_one_begins_after_an_hour_although_calls_come(collector: Collector, loop: JumpingLoop) -> None:
    loop.run(collector.while_collecting(busy=LATEST_S + 100.0))
    assert len(collector.begun) == 1
    assert LATEST_S <= collector.begun[0] <= LATEST_S + 2 * QUIET_S


def test_hours_in_which_none_was_due_do_not_count(collector: Collector, loop: JumpingLoop) -> None:
    async def live() -> None:
        collector.middle_since_full = 1
        work = asyncio.create_task(collect_while_quiet(lambda: collector.calls))
        await asyncio.sleep(2 * LATEST_S)
        collector.middle_since_full = 1_000
        await collector.busy(LATEST_S / 2)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    loop.run(live())
    assert collector.begun == []


async def test_python_begins_none_by_itself_while_serve_runs(certificates: Certificates) -> None:
    full = 0

    def called(phase: str, about: dict[str, int]) -> None:
        nonlocal full
        full += phase == "start" and about["generation"] == 2

    thresholds = gc.get_threshold()
    async with serving(settings_for(certificates), FaultyCluster()):
        await asyncio.sleep(0)  # its work in the background begins
        gc.callbacks.append(called)
        try:
            kept = [[number] for number in range(500_000)]
        finally:
            gc.callbacks.remove(called)
        assert (len(kept), full) == (500_000, 0)
    assert gc.get_threshold() == thresholds
