"""The job of the benchmark `neighbours`: what it measures, and how its answers become figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import _timed_job, neighbours
from benchmarks._timed_job import EACH_LINE, READY, Size, Timing

SMALL = Size(iterations=2_000_000, wake_ups=20, interval_us=1000)


@pytest.fixture(scope="module")
def program() -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    return _timed_job.program()


@pytest.fixture
def guest(program: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [program, *SMALL.arguments(), EACH_LINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        yield running
        running.communicate("")


def test_percentiles_are_values_that_occurred() -> None:
    late = list(range(1, 201))
    timing = Timing.read(json.dumps({"runUs": 1_500_000, "lateUs": late[::-1]}))
    assert timing == Timing(1.5, 100, 198, 200)
    assert Timing.read('{"runUs": 1, "lateUs": [7]}') == Timing(1e-6, 7, 7, 7)


@pytest.mark.parametrize("line", ["", "run", "[]", '{"lateUs": []}', "Kernel panic - not syncing"])
def test_another_line_is_not_an_answer(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Timing.read(line)


def test_each_figure_has_its_own_median() -> None:
    rounds = [Timing(1, 30, 100, 900), Timing(3, 10, 300, 100), Timing(2, 20, 200, 500)]
    assert Timing.median(rounds) == Timing(2, 20, 200, 500)


def test_the_job_runs_its_computation_and_wakes_up_on_time(program: Path) -> None:
    began = time.monotonic()
    done = subprocess.run([program, *SMALL.arguments()], capture_output=True, text=True, check=True)
    took = time.monotonic() - began
    printed = json.loads(done.stdout)
    assert len(printed["lateUs"]) == SMALL.wake_ups
    assert min(printed["lateUs"]) >= 0
    timing = Timing.read(done.stdout)
    assert 0 < timing.run_s < took
    assert took > timing.run_s + SMALL.wake_ups * SMALL.interval_us / 1e6


def test_in_a_guest_it_answers_an_empty_line_at_once_and_does_the_job_for_each_other_one(
    guest: subprocess.Popen[str],
) -> None:
    assert guest.stdin is not None
    assert guest.stdout is not None
    for sent, expected in (("\n", READY), ("run\n", "{"), ("\n", READY), ("run\n", "{")):
        guest.stdin.write(sent)
        guest.stdin.flush()
        assert guest.stdout.readline().startswith(expected)


def test_the_report_has_the_medians_and_the_range_of_the_rounds() -> None:
    timings = [Timing(1, 30, 1100, 9000), Timing(3, 10, 300, 100), Timing(2, 20, 200, 500)]
    found = {(kind, title): timings for kind in neighbours.KINDS for title in neighbours.TITLES}
    lines = neighbours.report(found).splitlines()
    assert len(lines) == 2 * (1 + len(neighbours.TITLES)) + 1
    assert lines[1].split() == [
        "alone",
        *["2.00", "20", "300", "500", "200", "to", "1,100", "100", "to", "9,000"],
    ]


def test_the_settings_differ_as_the_page_states() -> None:
    titles = ("alone", "without kvplace", "without kvplace, 1 CPU requested", "exclusive")
    assert titles == neighbours.TITLES
    without, more, exclusive = neighbours.SETTINGS
    assert (without.annotations, more.annotations) == ({}, {})
    assert exclusive.request == without.request != more.request
