"""How several worker processes share the tests (`./make test`, or `-n N`): by folder.

A folder is never divided, so its fixtures (an API server, a cluster with kvplace) are started once. Folders
whose tests change the machine itself (control groups, network namespaces, mounts) count as one, so these
tests never run at the same time. They take longest and come first.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

CHANGES_THE_MACHINE = "tests that change the machine"
FOLDERS_THAT_CHANGE_THE_MACHINE = frozenset(
    {"agent", "emulated_machine", "libvirt_session", "linux", "node_programs", "real_node"}
)


def unit_of(test: str) -> str:
    """Name the unit of work that a test belongs to; `test` is its node ID."""
    _tests, *inside = test.partition("::")[0].split("/")
    folder = inside[0] if len(inside) > 1 else ""
    return CHANGES_THE_MACHINE if folder in FOLDERS_THAT_CHANGE_THE_MACHINE else folder


class ByFolder(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives the next folder to a worker that has nothing left to do."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> ByFolder:
    """Share the tests by folder, in the order in which they were found."""
    config.option.loadscopereorder = False
    return ByFolder(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests that change the machine first where several workers share the tests."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: unit_of(item.nodeid) != CHANGES_THE_MACHINE)
