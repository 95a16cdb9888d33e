"""`kvplace web` in a process of its own, as people and pods run it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness.waiting import PATIENCE_S
from tests.cli.calls import COMMAND


class MapProcess:
    """A running `kvplace web`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process has printed its URL, the first line on stderr."""
        self._process = process
        self.printed = self.read_line()
        (self.url,) = re.findall(r"http://\S+", self.printed)

    def read_line(self) -> str:
        """Wait for the next line on stderr."""
        assert self._process.stderr is not None
        return self._process.stderr.readline().decode()

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Send a signal and wait; returns the exit code and what else was printed."""
        self._process.send_signal(number)
        out, err = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode, (out + err).decode()


@contextlib.contextmanager
def map_process(kubeconfig: Path, *options: str, **environment: str) -> Iterator[MapProcess]:
    """Run it while the block runs; enters when it has printed its URL."""
    with subprocess.Popen(
        [*COMMAND, "web", "--kubeconfig", str(kubeconfig), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # `communicate` reads from the pipe, past what a buffer has read ahead
        env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | environment,
    ) as process:
        try:
            yield MapProcess(process)
        finally:
            process.kill()
