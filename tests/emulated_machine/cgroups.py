"""Control groups of version 2 and processes in them, written apart from kvplace's own handling of them."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from harness.waiting import PATIENCE_S
from kvplace.core.cpuset import parse_cpu_list

T = TypeVar("T")

ROOT = Path("/sys/fs/cgroup")
_PAGES = re.compile(r"\bN(\d+)=(\d+)")
# Touches its memory, prints a line, and stays.
_HOLDER = """\
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
memory = bytearray(b"x") * int(sys.argv[2])
print(flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Group:
    """One control group."""

    path: Path

    def read(self, file: str) -> str:
        return (self.path / file).read_text().strip()

    def write(self, file: str, text: str) -> None:
        """Write with one system call, as the kernel wants it; an empty text is written, too."""
        descriptor = os.open(self.path / file, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode() or b"\n")
        finally:
            os.close(descriptor)

    def child(self, name: str) -> Group:
        """Make a group below this one, with a cpuset of its own."""
        self.write("cgroup.subtree_control", "+cpuset")
        below = Group(self.path / name)
        below.path.mkdir(exist_ok=True)
        return below

    def take(self, pid: int) -> None:
        self.write("cgroup.procs", str(pid))

    def remove(self) -> None:
        """Remove the group and all below it, with the processes in them."""
        self.write("cgroup.kill", "1")
        for path in sorted(self.path.rglob("*"), reverse=True):
            if path.is_dir():
                _removed_when_empty(path)
        _removed_when_empty(self.path)


def _removed_when_empty(path: Path) -> None:
    """Remove a group as soon as its last process has been waited for; until then the kernel reports EBUSY."""

    def removed() -> bool:
        try:
            path.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    wait_for(removed, bool)


@contextmanager
def group(name: str) -> Iterator[Group]:
    """Make a group below the root, and remove it with everything in it."""
    made = Group(ROOT).child(name)
    try:
        yield made
    finally:
        made.remove()


@contextmanager
def process_in(where: Group, *, megabytes: int = 1) -> Iterator[int]:
    """Start a process that is in a group before it touches its memory, and give its id."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _HOLDER, str(where.path / "cgroup.procs"), str(megabytes << 20)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"\n"
        yield process.pid
        process.kill()
    process.wait()


def affinity(task: int) -> int:
    """Read the CPUs that a task may run on."""
    text = Path(f"/proc/{task}/status").read_text()
    found = re.search(r"^Cpus_allowed_list:\s*(\S*)$", text, re.MULTILINE)
    assert found is not None
    return parse_cpu_list(found[1])


def pages_by_node(pid: int, smallest: int = 1000, where: str = "") -> dict[int, int]:
    """Count the pages of each NUMA node in the mappings of a process that have at least so many.

    With `where`, only in mappings that are described by this word.
    """
    pages: Counter[int] = Counter()
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        found = {int(node): int(count) for node, count in _PAGES.findall(line)}
        if sum(found.values()) >= smallest and (not where or where in line.split()):
            pages.update(found)
    return dict(pages)


def wait_for(read: Callable[[], T], wanted: Callable[[T], bool], seconds: float = PATIENCE_S) -> T:
    """Read until the value is as wanted, and give it; the kernel does not report when it has followed."""
    deadline = time.monotonic() + seconds
    while True:
        value = read()
        if wanted(value):
            return value
        assert time.monotonic() < deadline, f"after {seconds} s it is still {value!r}"
        time.sleep(0.02)
