"""pytest plugin: what a test runs against is built before the test starts, outside its time limit.

Tests that need nothing built never wait. `./make test` builds everything beside them (`harness/build.py`); a
test then waits for its own programs only. A missing compiler skips these tests on a developer's machine and
fails them where CI is set: a green CI run has really asked the API server.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from harness.build_cache import BuildFailed, NotInstalled, say_to_stderr
from harness.control_plane.programs import ALERTS, HELM, KUBERNETES, KUBEVIRT, PUBLISHING
from harness.go_build import GoModule, built
from harness.node_programs.programs import NODE_MODULES


@dataclass(frozen=True, slots=True)
class Need:
    """What a fixture runs: tests that use the fixture get the marker."""

    marker: str
    modules: tuple[GoModule, ...]


# Whoever writes a fixture that runs programs of a module names it here: they are then built before its first
# test starts, outside that test's time limit and with the message on the terminal.
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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Build what the test needs, or wait until another process has built it, before its time limit begins."""
    for name in NEEDS.keys() & set(getattr(item, "fixturenames", ())):
        for module in NEEDS[name].modules:
            _prepare(module)
    return (yield)


@functools.cache
def _prepare(module: GoModule) -> None:
    # Where this fails the fixture runs into the same error, and pytest reports it with the tests it stops.
    with suppress(BuildFailed):
        built(module, say_to_stderr)
