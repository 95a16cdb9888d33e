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

def built(module, say):
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

def test_with_what_cannot_be_built(publishing_programs): pass
"""


def test_what_a_test_needs_is_built_once_and_outside_its_time_limit(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(BUILDS, encoding="utf-8")
    (tmp_path / "test_builds.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n control_plane: x\n", encoding="utf-8")
    plugins = ("-p", "harness.build_fixtures", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", *plugins, "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "CI": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 passed, 1 error" in done.stdout, done.stdout + done.stderr
    said = re.findall(r"building \w+|\bwith(?:out)?$|\bagain$", done.stdout, re.MULTILINE)
    assert said[:4] == ["without", "building helm", "with", "again"]
    assert "BuildFailed: undefined: nonsense" in done.stdout
