"""A runtime that a test plays, and a plugin connected to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvplace.nri.plugin import NriRuntime
from tests.nri.fake_runtime import FakeRuntime, fake_runtime
from tests.nri.recorded_handler import RecordedHandler


@pytest.fixture
async def runtime() -> AsyncIterator[FakeRuntime]:
    async with fake_runtime() as played:
        yield played


@pytest.fixture
def handler() -> RecordedHandler:
    return RecordedHandler()


@pytest.fixture
async def plugin(runtime: FakeRuntime, handler: RecordedHandler) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(NriRuntime(runtime.socket).run(handler))
    yield task
    task.cancel()
    await asyncio.wait([task])
