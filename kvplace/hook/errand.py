"""One question, answered by a process of its own that lives for a moment.

What the answer needs (the XML library, the trial of memory policies) takes as much memory as the server and
is needed two or three times in a VM's life, so it is loaded in a forked child and goes with it. A document
that crashes the XML library takes the child along, not the server, and a child that hangs is killed.
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
    """What came back: the answer when the status is OK, else one sentence."""

    status: GrpcStatus
    said: bytes


@dataclass(slots=True)
class Errand:
    """A child at work: `pipe` is readable when it has said something, `deadline` is in monotonic seconds."""

    pid: int
    pipe: int
    deadline: float
    _said: bytearray = field(default_factory=bytearray)

    @classmethod
    def send(cls, question: Callable[[], bytes]) -> Errand:
        """Fork a child that answers the question; raises OSError when there can be no more processes."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        try:
            pid = os.fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if pid == 0:
            _answer_and_exit(question, writing)
        os.close(writing)
        return cls(pid=pid, pipe=reading, deadline=time.monotonic() + TIME_LIMIT_S)

    def listen(self) -> bool:
        """Take what the child has said so far; True once it has said everything."""
        while True:
            try:
                chunk = os.read(self.pipe, _CHUNK_BYTES)
            except BlockingIOError:
                return False
            if not chunk:
                return True
            self._said += chunk

    def end(self) -> Outcome:
        """Leave no trace of the child; its outcome, also when it was cut short."""
        os.close(self.pipe)
        os.kill(self.pid, signal.SIGKILL)
        _, how = os.waitpid(self.pid, 0)
        if self._said and os.waitstatus_to_exitcode(how) == 0:
            return Outcome(GrpcStatus(self._said[0]), bytes(self._said[1:]))
        if time.monotonic() >= self.deadline:
            sentence = f"pinning took longer than {TIME_LIMIT_S:g} seconds; is the node out of CPU time?"
        else:
            code = os.waitstatus_to_exitcode(how)
            sentence = f"the process that pins ended with {code}; is the sidecar's memory limit too low?"
        return Outcome(GrpcStatus.UNAVAILABLE, sentence.encode())


def _answer_and_exit(question: Callable[[], bytes], pipe: int) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _be_the_first_to_go()
        try:
            outcome = Outcome(GrpcStatus.OK, question())
        except KvplaceError as error:
            outcome = Outcome(grpc_status_of(error), str(error).encode())
        rest = memoryview(bytes([outcome.status]) + outcome.said)
        while rest:
            rest = rest[os.write(pipe, rest) :]
        code = 0
    finally:
        os._exit(code)


def _be_the_first_to_go() -> None:
    """Where memory runs out, lose this process and not the server."""
    with suppress(OSError):
        adjustment = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(adjustment, b"1000")
        os.close(adjustment)
