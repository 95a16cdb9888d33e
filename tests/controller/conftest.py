"""Tests of this folder run in virtual time, most of them on a cluster of one node."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping

import pytest

from tests.controller.relocations import NodeAgent
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT, TWO
from tests.virtual_time import JumpingLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """Choose the event loop of a test."""
    return {"virtual": JumpingLoop}


@pytest.fixture
def cluster() -> FaultyCluster:
    """A cluster of one node."""
    made = FaultyCluster()
    made.create_node("n1", topology=EIGHT)
    return made


@pytest.fixture
def agent(cluster: FaultyCluster) -> NodeAgent:
    """An agent on that node, which has two sockets of eight CPUs then."""
    made = NodeAgent(cluster, TWO)
    made.report()
    return made
