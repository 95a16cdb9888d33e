"""One cluster with KubeVirt and kvplace for all tests of the whole way."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.containers import Image, ProcessRunner, python_image
from harness.control_plane.hollow_node import NodesInBackground, nodes_in_background
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.kvplace_cluster.installation import SIDECAR_IMAGE, Installation
from harness.kvplace_cluster.machines import two_socket_machine, write_machine
from kvplace.core.topology import Topology


@pytest.fixture(scope="package")
def cluster(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane of its own: kvplace's webhooks concern every pod of the cluster they are in."""
    with ControlPlane() as plane:
        yield plane


@pytest.fixture(scope="package")
def virt(cluster: ControlPlane, kubevirt_programs: Path) -> Iterator[KubeVirt]:
    """Run KubeVirt with its own admission in it."""
    with KubeVirt(cluster, kubevirt_programs) as running:
        yield running


@pytest.fixture(scope="package")
def kvplace(cluster: ControlPlane, virt: KubeVirt) -> Iterator[Installation]:
    """Install kvplace: two replicas, each asked by a kube-scheduler of its own.

    No right may be missing.
    """
    with Installation(cluster, replicas=2) as installation:
        for replica in installation.replicas:
            installation.add_scheduler(replica)
        yield installation
        assert [line for replica in installation.replicas for line in replica.denials()] == []


@pytest.fixture
def machine() -> Topology:
    """Describe the machine of all hollow nodes of a test."""
    return two_socket_machine()


@pytest.fixture
def nodes(
    cluster: ControlPlane, kvplace: Installation, machine: Topology, tmp_path: Path
) -> Iterator[NodesInBackground]:
    """Run hollow nodes whose hook sidecars are the real program; other containers are hollow."""
    image = python_image("kvplace.hook")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the sidecar runs as another user
        seen = write_machine(Path(folder), machine)
        image = Image(image.entrypoint, image.command, {**image.environment, **seen})
        runner = ProcessRunner({SIDECAR_IMAGE: image})
        with nodes_in_background(cluster, (), runner=runner, folder=tmp_path / "kubelet") as background:
            yield background


@pytest.fixture
def vm_namespace(cluster: ControlPlane) -> Iterator[str]:
    """Give the test a namespace of its own."""
    name = cluster.create_namespace(f"vms-{secrets.token_hex(4)}")
    yield name
    cluster.remove_namespace(name)


@pytest.fixture(scope="package")
def templates() -> Path:
    """Name the folder of VM templates."""
    return Path(__file__).resolve().parents[2] / "vm-templates"
