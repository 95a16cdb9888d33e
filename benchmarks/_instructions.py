"""How many instructions processes execute, as `perf stat` counts them.

CPU time depends on how fast the machine happens to be: the clock, and what else uses caches and memory. The
same work in two rounds differs by a third on a shared machine, but its instructions by a hundredth. So they
compare two rounds better. Where perf is missing or may not count, there are none.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

_ATTACH_S = 0.5
"""perf prints nothing when it has begun to count."""


class Instructions:
    """Counts what processes and their threads, also later ones, execute while the block runs."""

    def __init__(self, pids: Mapping[str, Iterable[int]]) -> None:
        """`pids` are those of all processes that have a name together."""
        self.millions: dict[str, float] = {}
        """By name, after the block; a name that could not be counted is missing."""
        self._pids = {name: ",".join(map(str, those)) for name, those in pids.items()}
        self._counting: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if shutil.which("perf"):
            folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
            for number, (name, those) in enumerate(self._pids.items()):
                found = folder / str(number)
                command = ["perf", "stat", "-x,", "-e", "instructions", "-o", str(found), "-p", those]
                process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
                self._open.callback(process.wait)
                self._open.callback(process.kill)
                self._counting[name] = (process, found)
            time.sleep(_ATTACH_S)
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            for name, (process, found) in self._counting.items():
                process.send_signal(signal.SIGINT)
                process.wait()
                count = counted_in(found.read_text()) if found.exists() else None
                if count is not None:
                    self.millions[name] = count / 1e6


def counted_in(written: str) -> int | None:
    """Read what `perf stat -x,` writes: value, unit, event, ...; None if nothing was counted."""
    for line in written.splitlines():
        value, _, rest = line.partition(",")
        if "instructions" in rest and value.isdigit():
            return int(value)
    return None
