"""One cluster of two real nodes for all tests of the whole way."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.node_programs.programs import NodePrograms
from harness.real_node.cluster import RealCluster
from harness.real_node.images import node_image_archives


@pytest.fixture(scope="session")
def cluster(
    sandbox_machine: None,
    node_programs: NodePrograms,
    kubernetes_programs: Path,
    kubevirt_programs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RealCluster]:
    """Start two nodes; KVPLACE_REAL_NODE_LOGS names a folder that keeps their logs."""
    kept = os.environ.get("KVPLACE_REAL_NODE_LOGS")
    logs = Path(kept) if kept else tmp_path_factory.mktemp("real-nodes")
    images = node_image_archives()
    with RealCluster(
        node_programs, kubevirt_programs, images, logs, kubelets={"n1": {}, "n2": {}}
    ) as running:
        yield running


@pytest.fixture
def vm_namespace(cluster: RealCluster) -> Iterator[str]:
    """Give the test a namespace of its own."""
    name = cluster.plane.create_namespace(f"vms-{secrets.token_hex(4)}")
    yield name
    cluster.plane.remove_namespace(name)
