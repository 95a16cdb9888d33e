"""The promises hold in whatever order things happen and fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

STORIES = 80
"""More are told by `python -m tests.protocol --count N`."""
FOUND = ("20", "543", "855", "1075", "1130", "1167")
"""Stories that broke a promise once: a container that its agent had not reported, a bind that was repeated
late, a claim that was restored while its pod was relocated."""
PROJECT = Path(__file__).resolve().parents[2]


def told(*arguments: str) -> Counter[str]:
    """Tell stories in a process of their own, as when they are replayed, and count what happened in them."""
    command = [sys.executable, "-m", "tests.protocol", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    answer = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr[-4000:]
    return Counter(json.loads(answer.stdout.splitlines()[-1]))


def test_stories_that_once_broke_a_promise_keep_it() -> None:
    assert told(*FOUND)["bound"]


@pytest.mark.timeout(600)
def test_no_story_breaks_a_promise() -> None:
    happened = told("--first", "1000000", "--count", str(STORIES))
    for event in ("bound", "deleted by force", "migrated", "replica killed", "revision 3", "agrees"):
        assert happened[event] >= STORIES / 20, happened


def test_equal_seeds_tell_equal_stories() -> None:
    assert told("7") == told("7")
