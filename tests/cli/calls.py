"""Runs `kvplace` in this process, in a process of its own, or on a terminal."""

from __future__ import annotations

import io
import math
import os
import pty
import subprocess
import sys
from dataclasses import dataclass

import pytest

from kvplace.cli import progress
from kvplace.cli.main import main

COMMAND = [sys.executable, "-m", "kvplace"]


@dataclass(frozen=True)
class Called:
    """The result of a call."""

    code: int
    out: str
    err: str


class Caller:
    """Runs command lines in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: str, stdin: str | bytes = "") -> Called:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        # The output of a command must not depend on how busy the machine is.
        self._monkeypatch.setattr(progress, "QUIET_S", math.inf)
        with pytest.raises(SystemExit) as left:
            main(arguments)
        read = self._capsys.readouterr()
        assert isinstance(left.value.code, int)
        return Called(left.value.code, read.out, read.err)


def call_process(*arguments: str, stdin: str = "", environment: dict[str, str] | None = None) -> Called:
    """Run a command line in a process of its own, without a terminal."""
    done = subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, check=False, env=environment
    )
    return Called(done.returncode, done.stdout, done.stderr)


def on_a_terminal(*arguments: str, typed: str = "", **environment: str) -> str:
    """Return what a terminal shows; with `typed`, it is also stdin and stderr."""
    outer, inner = pty.openpty()
    if typed:
        os.write(outer, f"{typed}\N{END OF TRANSMISSION}".encode())
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=inner if typed else subprocess.DEVNULL,
        stdout=inner,
        stderr=inner if typed else subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", **environment},
    ) as process:
        os.close(inner)
        seen = b""
        try:
            while chunk := os.read(outer, 65536):
                seen += chunk
        except OSError:
            pass  # Linux reports so that the other side of a terminal is closed
        assert process.wait() == 0
    os.close(outer)
    return seen.decode()
