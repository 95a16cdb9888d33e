"""One answer, worked out by a forked child process that lives for a moment.

The work (the XML library, the trial of memory policies) takes as much memory as the server and is done two or
three times in a VM's life, so the child loads what it needs and frees it by ending. A document that crashes
the XML library crashes the child and not the server, and a child that hangs is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvplace.core.errors import GrpcStatus, KvplaceError, grpc_status_of

TIME_LIMIT_S = 8.0
"""virt-handler gives up on all calls of one start together after 20 seconds."""

_CHUNK_BYTES = 1 << 16


class Outcome(NamedTuple):
    """The result: the answer when the status is OK, else one sentence."""

    status: GrpcStatus
    output: bytes


@dataclass(slots=True)
class ChildProcess:
    """A child at work: `pipe` is readable when it has written, `deadline` is in monotonic seconds."""

    pid: int
    pipe: int
    deadline: float
    _output: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, work: Callable[[], bytes]) -> ChildProcess:
        """Fork a child that does the work; raises OSError when there can be no more processes."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        try:
            pid = os.fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if pid == 0:
            _work_and_exit(work, writing)
        os.close(writing)
        return cls(pid=pid, pipe=reading, deadline=time.monotonic() + TIME_LIMIT_S)

    def read(self) -> bool:
        """Read the child's output so far; True at its end."""
        while True:
            try:
                chunk = os.read(self.pipe, _CHUNK_BYTES)
            except BlockingIOError:
                return False
            if not chunk:
                return True
            self._output += chunk

    def end(self) -> Outcome:
        """Kill and reap the child, finished or not, and return its outcome."""
        os.close(self.pipe)
        os.kill(self.pid, signal.SIGKILL)
        _, wait_status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(wait_status)
        if self._output and code == 0:
            return Outcome(GrpcStatus(self._output[0]), bytes(self._output[1:]))
        if time.monotonic() >= self.deadline:
            sentence = f"pinning took longer than {TIME_LIMIT_S:g} seconds; is the node out of CPU time?"
        else:
            sentence = f"the process that pins ended with {code}; is the sidecar's memory limit too low?"
        return Outcome(GrpcStatus.UNAVAILABLE, sentence.encode())


def _work_and_exit(work: Callable[[], bytes], pipe: int) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prefer_to_be_killed()
        try:
            outcome = Outcome(GrpcStatus.OK, work())
        except KvplaceError as error:
            outcome = Outcome(grpc_status_of(error), str(error).encode())
        rest = memoryview(bytes([outcome.status]) + outcome.output)
        while rest:
            rest = rest[os.write(pipe, rest) :]
        code = 0
    finally:
        os._exit(code)


def _prefer_to_be_killed() -> None:
    """Where memory runs out, the kernel should kill this process and not the server."""
    with suppress(OSError):
        adjustment = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(adjustment, b"1000")
        os.close(adjustment)
