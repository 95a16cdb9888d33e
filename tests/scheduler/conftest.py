"""Tests of this folder run in virtual time, except those with real connections."""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping

import pytest

from tests.controller.relocations import NodeAgent, node_with_agent
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO
from tests.virtual_time import JumpingLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """Choose the event loop of a test."""
    if item.path.name in ("test_http.py", "test_http2.py"):
        return {"real": asyncio.new_event_loop}
    return {"virtual": JumpingLoop}


@pytest.fixture
def cluster() -> FaultyCluster:
    """One node with two sockets of eight CPUs and an agent; files with other nodes make their own."""
    return node_with_agent(TWO)


@pytest.fixture
def agent(cluster: FaultyCluster) -> NodeAgent:
    """The agent of that node."""
    return NodeAgent(cluster, TWO)
