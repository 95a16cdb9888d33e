"""Data captured elsewhere: machines, libvirt's own examples, and tables of the kubelet and other schedulers.

They are beside the project, not in it; KVPLACE_CAPTURED_DATA names the folder when a copy of the project runs
elsewhere. Without them their tests are skipped, which is reported in one line; CI must have them.
"""

import os
from functools import cache
from pathlib import Path

import pytest

from dev.step import in_ci
from kvplace.core.topology_levels import Discovery
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import open_tree

_BESIDE_THE_PROJECT = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
_CAPTURED = Path(os.environ.get("KVPLACE_CAPTURED_DATA", _BESIDE_THE_PROJECT))
MISSING = (
    "captured machines, libvirt's examples and tables of other schedulers are not here: "
    "set KVPLACE_CAPTURED_DATA to their folder"
)


def captured_folder(name: str) -> Path:
    """Find one folder of captured data, for instance `topologies`; fails in CI when it is missing."""
    folder = _CAPTURED / name
    if not folder.is_dir():
        _skip()
    return folder


def captured_files(name: str, pattern: str) -> list[Path]:
    """List the files of one captured folder for parametrised tests.

    Where they are missing, the list has one file that is not there, and the test of that file is skipped.
    """
    folder = _CAPTURED / name
    return sorted(folder.glob(pattern)) if folder.is_dir() else [folder / pattern]


CAPTURED_MACHINES = captured_files("topologies", "*/*.tar.*")
"""Archives of machines recorded from real hosts."""


@cache
def recorded_machine(path: Path) -> Discovery:
    """Read a captured archive, once for all tests of a run."""
    return discover(open_tree(path))


def pytest_report_collectionfinish(items: list[pytest.Item]) -> str:
    """Report before the first test what is skipped."""
    return "" if _CAPTURED.is_dir() or not items else f"skipped: tests of captured data ({MISSING})"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the test of a file that is not there."""
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec is not None else ():
        if isinstance(value, Path) and value.is_relative_to(_CAPTURED) and not value.exists():
            _skip()


def _skip() -> None:
    if in_ci():
        pytest.fail(MISSING)
    pytest.skip(MISSING)
