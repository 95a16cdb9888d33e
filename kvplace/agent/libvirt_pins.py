"""Asks the libvirt of a pod to keep the pins that the agent has set.

The calls for one VM are made by a process of their own, which is killed when it takes too long: the agent
never waits for a libvirt that hangs, and has neither its library nor its answers in its own memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass

from kvplace.core.errors import Unavailable
from kvplace.libvirt.domain_pins import SOCKET, DomainPins

ANSWER_WITHIN_S = 5.0
"""Longest time for the pins of one VM: libvirt needs about 1 ms each."""
_LONGEST_ANSWER = 8192
_COMMAND = (sys.executable, "-m", "kvplace.libvirt.pinning_process")


class LibvirtFailed(Unavailable):
    """The libvirt of a pod did not take the pins."""


@dataclass(frozen=True, slots=True)
class LibvirtPins:
    """The way to the libvirt of every pod."""

    socket: str = SOCKET
    """Where it listens, below the root of the container."""
    answer_within_s: float = ANSWER_WITHIN_S

    async def pin(self, qemu_pid: int, pins: DomainPins) -> int:
        """Make libvirt keep these pins of the domain of a QEMU; returns how many it did not have.

        Raises LibvirtFailed, at the latest after the longest time for an answer.
        """
        request = {"pid": qemu_pid, "socket": self.socket, "pins": pins.document()}
        try:
            child = await asyncio.create_subprocess_exec(
                *_COMMAND, stdin=PIPE, stdout=PIPE, limit=_LONGEST_ANSWER
            )
        except OSError as error:
            raise LibvirtFailed(f"no process can be started to talk to libvirt: {error.strerror}") from None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(self.answer_within_s):
                line = await child.stdout.readline()
                await child.wait()
        except TimeoutError:
            raise LibvirtFailed(
                f"the libvirt of process {qemu_pid} did not answer within {self.answer_within_s:g} s"
            ) from None
        except ValueError:
            raise LibvirtFailed("the process that talks to libvirt sent more than an answer") from None
        finally:
            if child.returncode is None:
                await _end(child)
        return _changed(line, qemu_pid)


async def _end(child: Process) -> None:
    try:
        child.kill()
    except ProcessLookupError:
        pass
    except PermissionError:  # it is another user's process by now
        raise LibvirtFailed(
            "the agent may not end the process that talks to libvirt; give it CAP_KILL, as its manifest does"
        ) from None
    await child.wait()


def _changed(line: bytes, qemu_pid: int) -> int:
    """Read an answer; raises LibvirtFailed for an error and for an invalid answer."""
    if not line:
        raise LibvirtFailed(
            f"the process that talks to the libvirt of process {qemu_pid} has ended without an answer, as it "
            "does when libvirt makes it use too much memory"
        )
    try:
        answer = json.loads(line)
        if "error" in answer:
            raise LibvirtFailed(str(answer["error"]))
        return int(answer["changed"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise LibvirtFailed("the process that talks to libvirt sent an invalid answer") from None
