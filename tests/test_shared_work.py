"""Worker processes share the tests by folder; those that change the machine never run at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from dev.__main__ import NEEDS_NOTHING
from tests.shared_work import (
    CHANGES_THE_MACHINE,
    FOLDERS_THAT_CHANGE_THE_MACHINE,
    LONGEST,
    MORE_THAN_PYTHON,
    folder_of,
    turn_of,
    units_of,
)

PROJECT = Path(__file__).resolve().parent.parent
IN_FULL = {"HYPOTHESIS_PROFILE": "kvplace", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""A quick run shares the tests by file. Plugins that are not used cost each process a second."""
WRITES_ITS_WORKER = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(4))
def test(number):
    folder = pathlib.Path(__file__).parent.name
    path = pathlib.Path(os.environ["WORKERS"]) / f"{folder}-{pathlib.Path(__file__).stem}-{number}"
    path.write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


@pytest.mark.parametrize(
    ("test", "unit"),
    [
        ("tests/core/test_cpuset.py::test_a[x::y]", "core"),
        ("tests/core/allocator/test_exact.py::test_b", "core"),
        ("tests/linux/test_cgroups.py::test_c", CHANGES_THE_MACHINE),
        ("tests/real_node/test_nri.py::test_d", CHANGES_THE_MACHINE),
        ("tests/test_project.py::test_e", ""),
        ("test_elsewhere.py::test_f", ""),
    ],
)
def test_the_folders_that_change_the_machine_count_as_one(test: str, unit: str) -> None:
    assert folder_of(test) == unit


def test_the_named_folders_exist() -> None:
    named = {*FOLDERS_THAT_CHANGE_THE_MACHINE, *LONGEST}
    assert all((PROJECT / "tests" / folder).is_dir() for folder in named)


def test_the_markers_of_tests_that_need_more_than_python_are_those_of_the_project() -> None:
    pytest_settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pytest"]
    assert {line.partition(":")[0] for line in pytest_settings["markers"]} == MORE_THAN_PYTHON
    assert set(NEEDS_NOTHING.split(" and ")) == {f"not {marker}" for marker in MORE_THAN_PYTHON}


def test_tests_that_need_only_python_come_first_and_then_the_longest() -> None:
    found = [
        ("tests/admission/test_a.py", {"control_plane"}),
        ("tests/admission/test_b.py", set()),
        ("tests/agent/test_c.py", {"parametrize"}),
        ("tests/core/test_d.py", {"parametrize"}),
        ("tests/end_to_end/test_e.py", {"control_plane"}),
        ("tests/faults/test_f.py", {"control_plane"}),
        ("tests/libvirt_session/test_g.py", {"libvirt_session"}),
        ("tests/linux/test_h.py", set()),
    ]

    def order(*, quick: bool) -> str:
        ranked = sorted(found, key=lambda test: turn_of(*test, quick=quick))
        return "".join(Path(test).stem[-1] for test, _markers in ranked)

    assert order(quick=False) == "bdchgefa"
    assert order(quick=True) == "chgbdefa"


def test_a_unit_is_a_stretch_of_one_folder_or_file() -> None:
    folders = ("admission/test_a", "admission/test_b", "agent/test_c", "linux/test_d", "admission/test_a")
    tests = [f"tests/{file}.py::test_{number}" for number, file in enumerate(folders)]
    by_folder, by_file = units_of(tests), units_of(tests, by_file=True)
    assert [len({units[test] for test in tests[:2]}) for units in (by_folder, by_file)] == [1, 2]
    for units in (by_folder, by_file):
        assert units[tests[2]] == units[tests[3]], "both change the machine"
        assert len({units[test] for test in (tests[0], tests[2], tests[4])}) == 3


def test_a_folder_is_run_by_one_worker_and_so_is_all_that_changes_the_machine(tmp_path: Path) -> None:
    workers = tmp_path / "workers"
    workers.mkdir()
    for folder in ("agent", "core", "linux", "web"):
        for file in ("test_one", "test_two"):
            path = tmp_path / "tests" / folder / f"{file}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(WRITES_ITS_WORKER, encoding="utf-8")
    done = _run_by_two_workers(tmp_path)
    assert "32 passed" in done.stdout, done.stdout + done.stderr
    ran: dict[str, set[str]] = defaultdict(set)
    for path in workers.iterdir():
        ran[folder_of(f"tests/{path.name.partition('-')[0]}/x.py")].add(path.read_text())
    assert set(ran) == {CHANGES_THE_MACHINE, "core", "web"}
    assert all(len(one) == 1 for one in ran.values())
    assert set.union(*ran.values()) == {"gw0", "gw1"}


def test_a_worker_that_dies_loses_just_the_test_in_which_it_died(tmp_path: Path) -> None:
    workers = tmp_path / "workers"
    workers.mkdir()
    dying = {"kube": 0, "plan": 1, "web": 3}
    for folder in ("agent", "core", *dying):
        path = tmp_path / "tests" / folder / "test_one.py"
        path.parent.mkdir(parents=True)
        end = f"    if number == {dying[folder]}: os._exit(1)\n" if folder in dying else ""
        path.write_text(WRITES_ITS_WORKER + end, encoding="utf-8")
    done = _run_by_two_workers(tmp_path)
    assert "3 failed, 17 passed" in done.stdout, done.stdout + done.stderr
    said_at_once, _summary = done.stdout.split("= FAILURES =")
    for folder, number in dying.items():
        assert f"crashed while running 'tests/{folder}/test_one.py::test[{number}]'" in said_at_once
    assert len(list(workers.iterdir())) == 20


def _run_by_two_workers(folder: Path) -> subprocess.CompletedProcess[str]:
    plugins = ("-p", "xdist", "-p", "tests.shared_work", "-p", "no:cacheprovider", "--import-mode=importlib")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", *plugins, "tests"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(PROJECT),
            "WORKERS": str(folder / "workers"),
            **IN_FULL,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
