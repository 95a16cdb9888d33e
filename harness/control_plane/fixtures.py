"""pytest fixtures of the shared control plane: one per test run, a namespace per test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.build_fixtures import skipped_if_not_installed
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.programs import ALERTS, HELM, KUBERNETES, PROMETHEUS_OPERATOR, PUBLISHING
from harness.go_build import built, downloaded


@pytest.fixture(scope="session")
def kubernetes_programs() -> Path:
    """Name the folder with Kubernetes' programs."""
    with skipped_if_not_installed():
        return built(KUBERNETES)


@pytest.fixture(scope="session")
def helm() -> Path:
    """Name the program helm."""
    with skipped_if_not_installed():
        return built(HELM) / "helm"


@pytest.fixture(scope="session")
def publishing_programs() -> Path:
    """Name the folder of the programs that publish and install images and the kubectl plugin."""
    with skipped_if_not_installed():
        return built(PUBLISHING)


@pytest.fixture(scope="session")
def alerts_program() -> Path:
    """Name the program that evaluates alerting rules."""
    with skipped_if_not_installed():
        return built(ALERTS) / "alerts"


@pytest.fixture(scope="session")
def prometheus_operator_crds() -> Path:
    """Name the folder with the CRDs of the Prometheus Operator."""
    with skipped_if_not_installed():
        module = downloaded(PROMETHEUS_OPERATOR, "github.com/prometheus-operator/prometheus-operator")
        return module / "example" / "prometheus-operator-crd"


@pytest.fixture(scope="session")
def control_plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Share one API server among all tests of the run; each adds its own schedulers and namespaces."""
    assert kubernetes_programs.is_dir()
    logs = os.environ.get("KVPLACE_CONTROL_PLANE_LOGS")
    with ControlPlane(logs=Path(logs) if logs else None) as plane:
        yield plane


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """Give the test a namespace of its own, and remove it with all that is in it."""
    name = control_plane.create_namespace(f"test-{secrets.token_hex(4)}")
    yield name
    control_plane.remove_namespace(name)
