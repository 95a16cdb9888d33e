"""Plays faults by name, or all: `python -m tests.faults [NAME ...]`; prints how long it took to go on."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

import pytest

from benchmarks._tables import table
from tests.faults.faulty_cluster import Outcome, Stage
from tests.faults.scenarios import SCENARIOS


def main(words: list[str]) -> int:
    """Play and print a table; returns 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="scenarios; all by default")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of all processes")
    chosen = parser.parse_args(words)
    wanted = [one for one in SCENARIOS if not chosen.names or one.name in chosen.names]
    rows = []
    failed = []
    with Stage(logs=chosen.logs) as stage:
        for scenario in wanted:
            try:
                outcome = scenario.play(stage)
            except (Exception, pytest.fail.Exception):
                traceback.print_exc()
                failed.append(scenario.name)
                outcome = Outcome(scenario.name, 0)
            seconds = (outcome.bound_s, outcome.agree_s, outcome.freed_s)
            rows.append(
                [scenario.sentence, str(outcome.pods), *("-" if s is None else f"{s:.1f}" for s in seconds)]
            )
            print(rows[-1], file=sys.stderr, flush=True)
    print(
        table(["fault", "pods", "all bound after s", "ledgers agree after s", "all cores free after s"], rows)
    )
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
