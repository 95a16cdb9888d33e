"""The files of a small host; tests of pauses run in virtual time, the others in the time of real files."""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.agent.hosts import Host
from tests.virtual_time import JumpingLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """Choose the event loop of a test."""
    if item.path.name == "test_back_off.py":
        return {"virtual": JumpingLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Make a host of two sockets with two cores of two threads each."""
    return Host(tmp_path / "host")
