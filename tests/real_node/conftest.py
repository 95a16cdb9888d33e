"""One cluster of two real nodes, with kvplace on them, for all tests of the whole way."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.node_programs.programs import NodePrograms
from harness.real_node.cluster import RealCluster
from harness.real_node.images import node_image_archives
from harness.real_node.kvplace_pods import install_kvplace
from tests.real_node.vms import Vms


@pytest.fixture(scope="package")
def cluster(
    sandbox_machine: None,
    node_programs: NodePrograms,
    kubernetes_programs: Path,
    kubevirt_programs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RealCluster]:
    """Start two nodes; KVPLACE_REAL_NODE_LOGS names a folder that keeps their logs.

    Each reserves another one of this machine's CPUs, so that VMs get other CPUs on the one than on the other.
    """
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a VM needs a CPU beside the one that the node reserves")
    kept = os.environ.get("KVPLACE_REAL_NODE_LOGS")
    logs = Path(kept) if kept else tmp_path_factory.mktemp("real-nodes")
    kubelets = {"n1": {"reservedSystemCPUs": "0"}, "n2": {"reservedSystemCPUs": "1"}}
    images = node_image_archives()
    with RealCluster(node_programs, kubevirt_programs, images, logs, kubelets=kubelets) as running:
        yield running


@pytest.fixture(scope="package")
def kvplace(cluster: RealCluster) -> RealCluster:
    """Install kvplace on it as an operator does; VMs that agree may migrate for others."""
    services = cluster.nodes["n1"].sandbox.service_subnet
    install_kvplace(cluster.plane, services, components=("moves-between-nodes",))
    return cluster


@pytest.fixture
def vm_namespace(cluster: RealCluster) -> Iterator[str]:
    """Give the test a namespace of its own."""
    name = cluster.plane.create_namespace(f"vms-{secrets.token_hex(4)}")
    yield name
    cluster.plane.remove_namespace(name)


@pytest.fixture
def vms(kvplace: RealCluster, vm_namespace: str) -> Iterator[Vms]:
    """VMs and pods of the test; at its end they are gone from the nodes and the ledgers, too."""
    made = Vms(kvplace, vm_namespace)
    yield made
    made.remove_all()
