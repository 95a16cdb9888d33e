"""pytest fixtures of the shared control plane: one per test run, a namespace per test.

A missing compiler skips these tests on a developer's machine and fails them where CI is set: a green CI run
has really asked the API server.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.control_plane.build import KUBERNETES, KUBEVIRT, BuildFailed, GoModule, ToolchainMissing, built
from harness.control_plane.cluster import ControlPlane

# Whoever writes a fixture that runs programs of a module names it here: they are then built before the
# first test starts, outside any test's time limit and with the message on the terminal.
NEEDS = {"kubernetes_programs": KUBERNETES, "kubevirt_programs": KUBEVIRT}


def programs(module: GoModule) -> Path:
    """Return the folder of a module's programs for a fixture; without Go this skips, in CI it fails."""
    try:
        return built(module)
    except ToolchainMissing as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what needs built programs, so that `-m 'not control_plane'` is the quick part of the suite."""
    if NEEDS.keys() & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.control_plane)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the collected tests need before any of them runs."""
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ()) if name in NEEDS}
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    for name in sorted(wanted):
        try:
            built(NEEDS[name], say=terminal.write_line if terminal else print)
        except BuildFailed:
            # The fixture runs into the same error, where pytest reports it with the tests it stops.
            continue


@pytest.fixture(scope="session")
def kubernetes_programs() -> Path:
    """Name the folder with Kubernetes' programs."""
    return programs(KUBERNETES)


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
