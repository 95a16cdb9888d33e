"""Fixtures: the files of a small host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.hosts import Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Make a host of two sockets with two cores of two threads each."""
    return Host(tmp_path / "host")
