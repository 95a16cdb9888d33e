"""The order of the tests, and how several worker processes share them (`./make test`, or `-n N`).

Tests that need nothing but Python come first, so that a mistake shows early. The others follow folder by
folder. A worker takes a stretch of tests of one folder, so the fixtures of a folder (an API server, a cluster
with kvplace) are started once. Folders whose tests change the machine itself (control groups, network
namespaces, mounts) are one stretch, so these tests never run at the same time. It is the longest and comes
first of those that need more than Python. In a quick run, which starts no servers, workers share by file,
and this stretch comes first: one worker alone would run it at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.profiles import IS_QUICK

CHANGES_THE_MACHINE = "tests that change the machine"
FOLDERS_THAT_CHANGE_THE_MACHINE = frozenset(
    {"agent", "libvirt_session", "linux", "node_programs", "real_node"}
)
LONGEST = ("end_to_end", "emulated_machine", "manifests", "faults", "security", "release")
"""The longest of the folders that need more than Python: begun last, one would run alone at the end."""
MORE_THAN_PYTHON = frozenset(
    {"control_plane", "node_programs", "libvirt_session", "real_node", "emulated", "debian_packages"}
)
"""The markers of tests that need servers, system packages or other machines."""


def folder_of(test: str) -> str:
    """Name the folder of a test, or all folders that change the machine; `test` is its node ID."""
    _tests, *inside = test.partition("::")[0].split("/")
    folder = inside[0] if len(inside) > 1 else ""
    return CHANGES_THE_MACHINE if folder in FOLDERS_THAT_CHANGE_THE_MACHINE else folder


def units_of(tests: Iterable[str], *, by_file: bool = False) -> dict[str, str]:
    """Name the unit of work that each test belongs to: a stretch of tests of one folder, or of one file."""
    units: dict[str, str] = {}
    last, stretch = "", 0
    for test in tests:
        folder = folder_of(test)
        here = test.partition("::")[0] if by_file and folder != CHANGES_THE_MACHINE else folder
        stretch += here != last
        last = here
        units[test] = f"{here} {stretch}"
    return units


class ByFolder(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives the next unit to a worker that has nothing left to do."""

    _units: Mapping[str, str] = MappingProxyType({})

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """Note what a worker has found, which is the same for all of them."""
        self._units = self._units or units_of(collection, by_file=IS_QUICK)
        super().add_node_collection(node, collection)

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]

    def _reschedule(self, node: WorkerController) -> None:
        """Leave out a worker that has not found its tests yet: it gets work when it has.

        xdist's own fails here when two workers have died and one of their successors is faster.
        """
        if node in self.registered_collections:
            super()._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Name the test in which a worker died, or None; the next worker gets the tests that it had left.

        xdist's own puts back the folders that were done, too. The next worker gets one of them, has nothing
        to run, reports nothing, is given nothing more, and all wait for ever. It also runs the test again
        that has just killed a worker.
        """
        left = {
            unit: [test for test, done in tests.items() if not done]
            for unit, tests in self.assigned_work.pop(node).items()
        }
        unfinished = [(unit, tests) for unit, tests in left.items() if tests]
        if not unfinished:
            return None
        died_in: str = unfinished[0][1].pop(0)
        for unit, tests in unfinished:
            if tests:
                self.workqueue[unit] = dict.fromkeys(tests, False)
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> ByFolder:
    """Share the tests by folder, in the order in which they were found."""
    config.option.loadscopereorder = False
    return ByFolder(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: pytest.TestReport, sched: ByFolder) -> None:
    """State at once in which test a worker died: whoever cuts a run short never sees its summary."""
    sched.config.get_terminal_writer().line(f"\n{report.longrepr}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests in their order."""
    items.sort(key=lambda item: turn_of(item.nodeid, {mark.name for mark in item.iter_markers()}))


def turn_of(test: str, markers: AbstractSet[str], *, quick: bool = IS_QUICK) -> tuple[int, int]:
    """Rank a test: the lowest come first, and equal ones stay as they were found."""
    folder, needs_more = folder_of(test), bool(MORE_THAN_PYTHON & markers)
    if folder == CHANGES_THE_MACHINE:
        return -1 if quick else 1, needs_more
    if not needs_more:
        return 0, 0
    return 2, LONGEST.index(folder) if folder in LONGEST else len(LONGEST)
