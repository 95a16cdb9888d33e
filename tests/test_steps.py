"""Commands beside the tests: a failed one is named, and what still runs at the end is ended."""

from __future__ import annotations

import os
from pathlib import Path

from dev.step import beside
from harness.waiting import wait_until


def test_a_command_that_fails_is_named_and_the_others_are_not(tmp_path: Path) -> None:
    commands = {"works": ["true"], "fails": ["false"], "runs": ["sleep", "600"]}
    with beside(commands, cwd=tmp_path, environment={}) as failures:
        wait_until(failures, lambda: "the failed command is not named")
        assert failures() == ["fails"]


def test_running_commands_are_ended_with_their_children(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with beside({"runs": ["sh", "-c", f"sleep 600 >{pipe} & wait"]}, cwd=tmp_path, environment={}):
        reader = pipe.open("rb")
    with reader:
        assert reader.read() == b"", "a pipe ends with the last process that holds it"
