"""Counting the instructions of other processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks._instructions import Instructions, counted_in


def test_counts_of_perf_are_read_and_events_that_it_could_not_count_are_missing() -> None:
    head = "# started on Mon Nov 23 08:30:44 2026\n\n"
    assert counted_in(f"{head}778881599,,instructions,12865864697,100.00,0.12,insn per cycle\n") == 778881599
    assert counted_in(f"{head}778881599,,instructions:u,12865864697,100.00,,\n") == 778881599
    assert counted_in(f"{head}<not counted>,,instructions,0,100.00,,\n") is None
    assert counted_in(f"{head}<not supported>,,instructions,0,100.00,,\n") is None


def test_without_perf_nothing_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Instructions({"this": [os.getpid()]}) as instructions:
        pass
    assert instructions.millions == {}
