"""A test waits for what it runs against, for nothing else, and not within its time limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
BUILDS = """
import time
import pytest
from harness import build_fixtures
from harness.build_cache import BuildFailed

def built(module, state):
    print("building", module.name, flush=True)
    time.sleep(1.5)
    if module.name == "publishing":
        raise BuildFailed("undefined: nonsense")

build_fixtures.built = built

@pytest.fixture
def helm():
    return "helm"

@pytest.fixture
def publishing_programs():
    built(build_fixtures.PUBLISHING, print)
"""
TESTS = """
import pytest

def test_without(): print("without")

@pytest.mark.timeout(1)
def test_with(helm): print("with")

@pytest.mark.timeout(1)
def test_again(helm): print("again")

def test_with_a_program_that_cannot_be_built(publishing_programs): pass
"""


def _run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(BUILDS, encoding="utf-8")
    (folder / "test_builds.py").write_text(TESTS, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n control_plane: x\n", encoding="utf-8")
    plugins = ("-p", "harness.build_fixtures", "-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-s", *plugins, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "CI": "", "KVPLACE_BUILD": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_programs_of_a_test_are_built_once_and_outside_its_time_limit(tmp_path: Path) -> None:
    done = _run(tmp_path, CI="true")
    assert "3 passed, 1 error" in done.stdout, done.stdout + done.stderr
    said = re.findall(r"building \w+|\bwith(?:out)?$|\bagain$", done.stdout, re.MULTILINE)
    assert said[:4] == ["without", "building helm", "with", "again"]
    assert "BuildFailed: undefined: nonsense" in done.stdout


def test_pytest_alone_builds_nothing_and_reports_skipped_tests_at_once(tmp_path: Path) -> None:
    done = _run(tmp_path, XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert "1 passed, 3 skipped" in done.stdout, done.stdout + done.stderr
    before, _first, _after = done.stdout.partition("\n\n")
    assert "skipped: 3 tests of programs that are not built (helm; crane with its registry" in before
    assert "`./make test test_builds.py` builds them" in before
    assert "building" not in done.stdout


def test_make_test_builds_outside_ci_too(tmp_path: Path) -> None:
    done = _run(tmp_path, KVPLACE_BUILD="1")
    assert "3 passed, 1 error" in done.stdout, done.stdout + done.stderr
