"""A shell on a terminal, as a person has it: what is typed, and what then stands on the screen."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from harness.waiting import PATIENCE_S, wait_until

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[=>])")


class Terminal:
    """A program on a terminal; ends with the block."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, piped: bool = False
    ) -> None:
        """`piped`: stdout is not the terminal, as before a pipe."""
        self._outer, inner = pty.openpty()
        self._process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=subprocess.DEVNULL if piped else inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm", **environment},
            start_new_session=True,
        )
        os.close(inner)
        self._shown = b""
        """Everything that the program has written."""
        self._read = 0
        """How many characters of the text without escapes have been read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._outer)

    def type(self, text: str) -> None:
        """Type keys."""
        os.write(self._outer, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C, which reaches every program on the terminal."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait_for_question(self, words: str) -> None:
        """Wait until the screen shows a question and the program reads the answer."""
        self.read_until(words)
        wait_until_it_sleeps(self._process.pid)

    def end(self) -> int:
        """Return the program's exit code once it has ended."""
        return self._process.wait(PATIENCE_S)

    def read_until(self, words: str) -> str:
        """Return what the screen has shown since the last call, once it shows these words."""
        os.set_blocking(self._outer, False)
        give_up = time.monotonic() + PATIENCE_S
        while words not in (unread := self._text()[self._read :]):
            assert time.monotonic() < give_up, f"no {words!r} on the screen, only {unread!r}"
            try:
                self._shown += os.read(self._outer, 65536)
            except BlockingIOError:
                time.sleep(0.01)
        found = unread[: unread.index(words) + len(words)]
        self._read += len(found)
        return found

    def _text(self) -> str:
        """Return everything without escapes, also those that came in two pieces."""
        return _ESCAPES.sub("", self._shown.decode(errors="replace"))


def wait_until_it_sleeps(pid: int) -> None:
    """Wait until a program that reads next is in the kernel: Python loses a signal just before a read."""
    state = Path(f"/proc/{pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "S", lambda: "it does not wait")
