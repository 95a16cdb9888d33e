"""How several worker processes share the tests (`./make test`, or `-n N`): by folder.

A folder is never divided, so its fixtures (an API server, a cluster with kvplace) are started once. Folders
whose tests change the machine itself (control groups, network namespaces, mounts) count as one, so these
tests never run at the same time. They take longest and come first. Folders in which nothing waits for a
program that is still being built come next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

CHANGES_THE_MACHINE = "tests that change the machine"
FOLDERS_THAT_CHANGE_THE_MACHINE = frozenset(
    {"agent", "libvirt_session", "linux", "node_programs", "real_node"}
)
LONGEST = ("end_to_end", "emulated_machine", "manifests", "faults", "security", "release")
"""What takes longest of the folders that wait for programs: begun last, it would run alone at the end."""
WAITS = frozenset({"control_plane", "node_programs"})
"""The markers of tests that run programs built from source."""


def unit_of(test: str) -> str:
    """Name the unit of work that a test belongs to; `test` is its node ID."""
    _tests, *inside = test.partition("::")[0].split("/")
    folder = inside[0] if len(inside) > 1 else ""
    return CHANGES_THE_MACHINE if folder in FOLDERS_THAT_CHANGE_THE_MACHINE else folder


class ByFolder(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives the next folder to a worker that has nothing left to do."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

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
    """Say at once in which test a worker died: whoever cuts a run short never sees its summary."""
    sched.config.get_terminal_writer().line(f"\n{report.longrepr}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the folders in their order where several workers share the tests."""
    if hasattr(config, "workerinput"):
        waiting = {
            unit_of(item.nodeid) for item in items if WAITS & {mark.name for mark in item.iter_markers()}
        }
        items.sort(key=lambda item: turn_of(unit_of(item.nodeid), waiting))


def turn_of(unit: str, waiting: Collection[str]) -> int:
    """Rank a unit: the lowest is begun first; `waiting` are those with tests that wait for programs."""
    if unit == CHANGES_THE_MACHINE:
        return 0
    if unit not in waiting:
        return 1
    return 2 + (LONGEST.index(unit) if unit in LONGEST else len(LONGEST))
