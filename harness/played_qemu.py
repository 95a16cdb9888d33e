"""Processes that resemble QEMU from outside: a program's name, and threads with QEMU's names that sleep.

    python -m harness.played_qemu COUNT THREAD...

prints the ids of COUNT processes, one a line, and ends with its stdin. A line `PID NAME` on stdin starts one
more thread in one of them, and is answered by the id of the thread.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "qemu-kvm"
THREADS = ("call_rcu", "IO mon_iothread", "IO iothread1", "vhost-worker")
PR_SET_NAME = 15
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class PlayedQemus:
    """The processes, as seen by the test that started them."""

    pids: list[int]
    control: subprocess.Popen[str]

    def start_thread(self, pid: int, name: str) -> int:
        """Start one more thread in one of the processes; returns its id."""
        assert self.control.stdin is not None
        assert self.control.stdout is not None
        self.control.stdin.write(f"{pid} {name}\n")
        self.control.stdin.flush()
        return int(self.control.stdout.readline())

    def end(self, pid: int) -> None:
        """End one of the processes."""
        descriptor = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([descriptor], [], [])
        os.close(descriptor)
        while Path(f"/proc/{pid}").exists():  # for the moment until the kernel has reaped it
            pass


@contextmanager
def played_qemus(
    count: int = 1, *, vcpus: int = 2, threads: tuple[str, ...] = THREADS
) -> Iterator[PlayedQemus]:
    """Play so many VMs for a while."""
    names = [*(f"CPU {number}/KVM" for number in range(vcpus)), *threads]
    with subprocess.Popen(
        [sys.executable, "-m", "harness.played_qemu", str(count), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
    ) as control:
        assert control.stdin is not None
        assert control.stdout is not None
        try:
            yield PlayedQemus([int(control.stdout.readline()) for _ in range(count)], control)
        finally:
            control.stdin.close()
            control.wait()


def main(count: int, names: list[str]) -> None:
    """Start the processes and obey."""
    children: dict[int, tuple[int, int]] = {}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in range(count):
        to_child, from_child = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            _play(names, to_child[0], from_child[1])
        children[pid] = (to_child[1], from_child[0])
        os.read(from_child[0], 64)
        print(pid, flush=True)
    for line in sys.stdin:
        number, _, name = line.strip().partition(" ")
        write, read = children[int(number)]
        os.write(write, name.encode())
        print(os.read(read, 64).decode(), flush=True)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.wait()  # with SIGCHLD ignored it returns when the last one has ended


def _play(names: list[str], commands: int, answers: int) -> None:
    threading.stack_size(64 * 1024)
    Path("/proc/self/comm").write_text(PROGRAM)
    for name in names:
        _start(name)
    os.write(answers, b"ready")
    while name := os.read(commands, 64).decode():
        os.write(answers, str(_start(name)).encode())
    os._exit(0)


def _start(name: str) -> int:
    named = threading.Event()

    def sleep() -> None:
        _libc.prctl(PR_SET_NAME, name.encode())
        named.set()
        signal.pause()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    named.wait()
    assert thread.native_id is not None
    return thread.native_id


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
