"""A cluster of one node, for the tests that ask `explain` about its VMs."""

from __future__ import annotations

import pytest

from tests.explain.small_cluster import Objects
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.fixture
def cluster() -> FaultyCluster:
    made = FaultyCluster()
    made.create_node("worker", topology=TWO)
    return made
