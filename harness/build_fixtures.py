"""pytest plugin: the programs that a test runs are built before the test starts, outside its time limit.

Tests that need nothing built never wait. `./make test` builds everything beside them (`harness/build.py`); a
test then waits for its own programs only. `pytest` alone builds nothing: it skips the tests of programs that
are not built yet, and reports this before the first test. A missing compiler skips these tests, too. Where CI
is set, nothing is skipped: a green CI run has really asked the API server.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from dev.step import in_ci
from harness.build_cache import BuildFailed, NotInstalled, say_to_stderr
from harness.control_plane.programs import ALERTS, HELM, KUBERNETES, KUBEVIRT, PUBLISHING
from harness.go_build import GoModule, built, is_built
from harness.node_programs.programs import DRA_DRIVER_CPU, NODE_MODULES


@dataclass(frozen=True, slots=True)
class Need:
    """The programs of a fixture: tests that use the fixture get the marker."""

    marker: str
    modules: tuple[GoModule, ...]


# A new fixture that runs programs of a module is named here: they are then built before its first
# test starts, outside that test's time limit and with the message on the terminal.
NEEDS = {
    "kubernetes_programs": Need("control_plane", (KUBERNETES,)),
    "helm": Need("control_plane", (HELM,)),
    "publishing_programs": Need("control_plane", (PUBLISHING,)),
    "alerts_program": Need("control_plane", (ALERTS,)),
    "kubevirt_programs": Need("control_plane", (KUBEVIRT,)),
    "node_programs": Need("node_programs", NODE_MODULES),
    "dra_driver_cpu": Need("node_programs", (DRA_DRIVER_CPU,)),
}


@contextmanager
def skipped_if_not_installed() -> Iterator[None]:
    """For a fixture that builds: skip when a compiler or a program is missing here; in CI fail."""
    try:
        yield
    except NotInstalled as missing:
        if in_ci():
            raise
        pytest.skip(str(missing))


_SKIPPED = pytest.StashKey[str]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of built programs, so that `-m 'not control_plane and not node_programs'` is quick."""
    for need in _needs(item):
        item.add_marker(need.marker)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests of programs that are not built, unless this run builds them."""
    if _builds():
        return
    skipped: list[pytest.Item] = []
    contents: dict[str, None] = {}
    for item in items:
        if absent := [module.contents for module in _modules(item) if not _is_built(module)]:
            item.add_marker(pytest.mark.skip(f"not built: {'; '.join(absent)}"))
            skipped.append(item)
            contents.update(dict.fromkeys(absent))
    if skipped:
        folders = {"/".join(item.nodeid.partition("::")[0].split("/")[:2]) for item in skipped}
        command = " ".join(["./make test", *(sorted(folders) if len(folders) < 4 else [])])
        config.stash[_SKIPPED] = (
            f"skipped: {len(skipped)} tests of programs that are not built ({'; '.join(contents)}); "
            f"`{command}` builds them, which takes minutes"
        )


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """Report the skipped tests before the first test."""
    return config.stash.get(_SKIPPED, "")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Build the programs of the test, or wait for another process to do so, before its time limit begins."""
    if _builds():
        for module in _modules(item):
            _prepare(module)
    return (yield)


def _builds() -> bool:
    return in_ci() or bool(os.environ.get("KVPLACE_BUILD"))


def _needs(item: pytest.Item) -> list[Need]:
    return [NEEDS[name] for name in NEEDS.keys() & set(getattr(item, "fixturenames", ()))]


def _modules(item: pytest.Item) -> list[GoModule]:
    return [module for need in _needs(item) for module in need.modules]


_is_built = functools.cache(is_built)


@functools.cache
def _prepare(module: GoModule) -> None:
    # If this fails, the fixture gets the same error, and pytest reports it with the stopped tests.
    with suppress(BuildFailed):
        built(module, say_to_stderr)
