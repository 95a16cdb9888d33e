"""pytest fixtures of KubeVirt's parts: its launcher side alone, or all of it in the shared control plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.build_fixtures import skipped_if_not_installed
from harness.control_plane.cluster import ControlPlane, Json
from harness.control_plane.kubevirt_parts import KubeVirt, installation
from harness.control_plane.launcher_side import LauncherSide
from harness.control_plane.programs import KUBEVIRT
from harness.go_build import built


@pytest.fixture(scope="session")
def kubevirt_programs() -> Path:
    """Name the folder with KubeVirt's programs."""
    with skipped_if_not_installed():
        return built(KUBEVIRT)


@pytest.fixture(scope="session")
def launcher_side(kubevirt_programs: Path) -> LauncherSide:
    """Answer as KubeVirt between a VMI and its hook; needs no cluster."""
    return LauncherSide(kubevirt_programs)


@pytest.fixture(scope="session")
def kubevirt_crds(kubevirt_programs: Path) -> dict[str, Json]:
    """Return KubeVirt's custom resource definitions by name (`virtualmachines.kubevirt.io`)."""
    crds: list[Json] = installation(kubevirt_programs)["crds"]
    return {crd["metadata"]["name"]: crd for crd in crds}


@pytest.fixture(scope="session")
def kubevirt(control_plane: ControlPlane, kubevirt_programs: Path) -> Iterator[KubeVirt]:
    """Share one KubeVirt, with its admission and its virt-controller, among all tests of the run."""
    with KubeVirt(control_plane, kubevirt_programs) as running:
        yield running
