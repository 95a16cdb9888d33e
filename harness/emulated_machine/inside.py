"""The first process of an emulated machine: calls functions of this project as the test on the outside asks.

One call at a time, each in a fork of this process, so that none leaves anything behind without intent:
files, control groups, and daemons that it starts. Modules are imported here, before the fork: that is slow
under emulation, and needed once. Ends the machine when the test's end of the channel closes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NoReturn

from harness.emulated_machine.channel import Answer, Call, Ready, receive, send

Task = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]

_PORTS = Path("/sys/class/virtio-ports")
_RB_POWER_OFF = 0x4321FEDC


def main() -> None:
    """Serve calls until the channel closes, then switch the machine off."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    # The console stays for reports of the kernel; the channel is for everything else.
    (port,) = _PORTS.iterdir()
    # Unbuffered: a reader with a buffer would wait for more than one message.
    with FileIO(f"/dev/{port.name}", "r+") as channel:
        send(channel, Ready(os.uname().release))
        while (call := receive(channel)) is not None:
            assert isinstance(call, Call)
            send(channel, _answer(call))
    os.sync()
    ctypes.CDLL(None).reboot(_RB_POWER_OFF)


def _answer(call: Call) -> Answer:
    try:
        task: Task = pickle.loads(call.task)
    except Exception:
        return Answer(None, "it cannot be imported", traceback.format_exc())
    # In files, not pipes: a daemon that a call starts may never close them.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as result:
        child = os.fork()
        if child == 0:
            _run(task, output.fileno(), result.fileno())
        status = _wait_for(child, call.timeout_s)
        output.seek(0)
        result.seek(0)
        said = output.read().decode(errors="replace")
        value = result.read()
    if status is None:
        return Answer(None, f"it took longer than {call.timeout_s} s", said)
    if status != 0:
        return Answer(None, f"its process ended with {status}", said)
    return Answer(value, "", said)


def _run(task: Task, output: int, result: int) -> NoReturn:
    """Be the process of a call."""
    code = 1
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        function, arguments, named = task
        os.write(result, pickle.dumps(function(*arguments, **named)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for(child: int, seconds: float) -> int | None:
    """Wait for one child, and bury every orphan meanwhile; gives None for a child that had to be killed."""
    deadline = time.monotonic() + seconds
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return os.waitstatus_to_exitcode(ended[1])
        left = deadline - time.monotonic()
        if left <= 0 or signal.sigtimedwait({signal.SIGCHLD}, left) is None:
            # A last word: where it hangs.
            os.kill(child, signal.SIGABRT)
            os.waitpid(child, 0)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            return None


if __name__ == "__main__":
    main()
