"""pytest plugin: everything that tests run against is built before the first of them starts.

A missing compiler skips these tests on a developer's machine and fails them where CI is set: a green CI run
has really asked the API server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from harness.build_cache import BuildFailed, NotInstalled
from harness.control_plane.programs import ALERTS, HELM, KUBERNETES, KUBEVIRT, PUBLISHING
from harness.go_build import GoModule, built
from harness.node_programs.programs import NODE_MODULES


@dataclass(frozen=True, slots=True)
class Need:
    """What a fixture runs: tests that use the fixture get the marker."""

    marker: str
    modules: tuple[GoModule, ...]


# Whoever writes a fixture that runs programs of a module names it here: they are then built before the
# first test starts, outside any test's time limit and with the message on the terminal.
NEEDS = {
    "kubernetes_programs": Need("control_plane", (KUBERNETES,)),
    "helm": Need("control_plane", (HELM,)),
    "publishing_programs": Need("control_plane", (PUBLISHING,)),
    "alerts_program": Need("control_plane", (ALERTS,)),
    "kubevirt_programs": Need("control_plane", (KUBEVIRT,)),
    "node_programs": Need("node_programs", NODE_MODULES),
}


@contextmanager
def skipped_if_not_installed() -> Iterator[None]:
    """For a fixture that builds: skip when a compiler or a program is missing here; in CI fail."""
    try:
        yield
    except NotInstalled as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what needs built programs, so that `-m 'not control_plane and not node_programs'` is quick."""
    for name in NEEDS.keys() & set(getattr(item, "fixturenames", ())):
        item.add_marker(NEEDS[name].marker)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the collected tests need before any of them runs."""
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ()) if name in NEEDS}
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    for name in sorted(wanted):
        try:
            for module in NEEDS[name].modules:
                built(module, say=terminal.write_line if terminal else print)
        except BuildFailed:
            # The fixture runs into the same error, where pytest reports it with the tests it stops.
            continue
