"""pytest fixtures of a real node's programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.build_fixtures import skipped_if_not_installed
from harness.go_build import built
from harness.node_programs.programs import DRA_DRIVER_CPU, NodePrograms
from harness.node_programs.programs import node_programs as build_node_programs


@pytest.fixture(scope="session")
def node_programs() -> NodePrograms:
    """Name the programs of a real node, built from source."""
    with skipped_if_not_installed():
        return build_node_programs()


@pytest.fixture(scope="session")
def dra_driver_cpu() -> Path:
    """Name the program of dra-driver-cpu, built from source."""
    with skipped_if_not_installed():
        return built(DRA_DRIVER_CPU) / "dracpu"
