"""pytest fixtures of a real node's programs."""

from __future__ import annotations

import pytest

from harness.build_fixtures import skipped_if_not_installed
from harness.node_programs.programs import NodePrograms
from harness.node_programs.programs import node_programs as build_node_programs


@pytest.fixture(scope="session")
def node_programs() -> NodePrograms:
    """Name the programs of a real node, built from source."""
    with skipped_if_not_installed():
        return build_node_programs()
