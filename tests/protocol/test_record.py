"""A long run can be ended and goes on later, always about one commit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.protocol.replay import run
from tests.protocol.results_file import Part, Record, Told
from tests.protocol.run_kind import Kind

STORIES = 52
"""Two parts: fifty stories, and the others."""


def test_recorded_runs_are_read_again(tmp_path: Path) -> None:
    part = Part(100, 50, Kind.ROOM)
    told = Told(Counter(bound=3), {17, -4}, {120: "6: a waits, and it fits on n1"})
    Record(tmp_path / "record", "c0ffee").add(part, told)
    assert Record(tmp_path / "record", "c0ffee").told == {part: told}


def test_a_record_about_another_commit_is_refused(tmp_path: Path) -> None:
    Record(tmp_path / "record", "c0ffee")
    with pytest.raises(ValueError, match="is about commit c0ffee, and this is decade: name another file"):
        Record(tmp_path / "record", "decade")


def test_a_run_that_was_ended_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "record"
    arguments = ("--first", "2000000", "--count", str(STORIES), "--jobs", "2", "--record", str(path))
    whole = run(*arguments)
    assert whole.returncode == 0, whole.stderr
    begun, *parts = path.read_text().splitlines()
    assert len(parts) == 2
    longest = max(parts, key=lambda part: json.loads(part)["part"]["count"])
    path.write_text(f"{begun}\n{longest}\n")
    again = run(*arguments)
    assert json.loads(again.stdout) == json.loads(whole.stdout)
    assert sorted(path.read_text().splitlines()) == sorted([begun, *parts])
