"""Commands beside the tests: a failed one is named, and what still runs at the end is ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dev.step import beside

_PATIENCE_S = 60.0


def test_a_command_that_fails_is_named_and_the_others_are_not(tmp_path: Path) -> None:
    commands = {"works": ["true"], "fails": ["false"], "runs": ["sleep", "600"]}
    with beside(commands, cwd=tmp_path, environment={}) as failures:
        deadline = time.monotonic() + _PATIENCE_S
        while not failures():
            assert time.monotonic() < deadline, "the failed command is not named"
            time.sleep(0.01)
        assert failures() == ["fails"]


def test_what_still_runs_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with beside({"runs": ["sh", "-c", f"sleep 600 >{pipe} & wait"]}, cwd=tmp_path, environment={}):
        reader = pipe.open("rb")
    with reader:
        assert reader.read() == b"", "a pipe ends with the last process that holds it"
