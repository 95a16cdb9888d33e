"""Tests of this folder run in virtual time."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping

from tests.virtual_time import JumpingLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """Choose the event loop of a test."""
    return {"virtual": JumpingLoop}
