"""Asks the libvirt of a pod to keep the pins that the agent has set.

The calls are made by a child process. It is started when there is something to ask, killed when an answer
takes too long, and ends itself when nothing has been asked for a while: the agent never waits for a libvirt
that hangs, and does not keep libvirt-python in its memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process

from kvplace.core.errors import Unavailable
from kvplace.libvirt.domain_pins import SOCKET, DomainPins

ANSWER_WITHIN_S = 5.0
"""Longest time for the pins of one VM: libvirt needs about 1 ms each."""
IDLE_S = 10.0
"""The child is kept for so long after its last answer."""
_COMMAND = (sys.executable, "-m", "kvplace.libvirt.pinning_process")


class LibvirtFailed(Unavailable):
    """The libvirt of a pod did not take the pins."""


class LibvirtPins:
    """The way to every libvirt of this node, one request at a time."""

    def __init__(
        self, *, socket: str = SOCKET, answer_within_s: float = ANSWER_WITHIN_S, idle_s: float = IDLE_S
    ) -> None:
        self._socket = socket
        self._answer_within_s = answer_within_s
        self._idle_s = idle_s
        self._turn = asyncio.Lock()
        self._child: Process | None = None
        self._idle: asyncio.Task[None] | None = None

    async def pin(self, qemu_pid: int, pins: DomainPins) -> int:
        """Make libvirt keep these pins of the domain of a QEMU; returns how many it did not have.

        Raises LibvirtFailed, at the latest after the longest time for an answer.
        """
        async with self._turn:
            if self._idle is not None:
                self._idle.cancel()
            try:
                async with asyncio.timeout(self._answer_within_s):
                    answer = await self._ask(
                        {"pid": qemu_pid, "socket": self._socket, "pins": pins.document()}
                    )
            except TimeoutError:
                await self._end_child()
                raise LibvirtFailed(
                    f"the libvirt of process {qemu_pid} did not answer within {self._answer_within_s:g} s"
                ) from None
            except BaseException:
                await self._end_child()
                raise
            self._idle = asyncio.create_task(self._end_when_idle())
        if "error" in answer:
            raise LibvirtFailed(str(answer["error"]))
        return int(answer["changed"])

    @property
    def child_pid(self) -> int | None:
        """The process that talks to libvirt; None while there is none."""
        return self._child.pid if self._child is not None else None

    async def close(self) -> None:
        """End the child."""
        if self._idle is not None:
            self._idle.cancel()
        await self._end_child()

    async def _ask(self, request: dict[str, object]) -> dict[str, int | str]:
        child = self._child
        if child is None or child.returncode is not None:
            try:
                child = self._child = await asyncio.create_subprocess_exec(*_COMMAND, stdin=PIPE, stdout=PIPE)
            except OSError as error:
                raise LibvirtFailed(
                    f"no process can be started to talk to libvirt: {error.strerror}"
                ) from None
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request).encode() + b"\n")
        try:
            line = await child.stdout.readline()
        except ValueError:  # longer than asyncio reads
            raise LibvirtFailed(
                "the process that talks to libvirt sent an answer of endless length"
            ) from None
        if not line:
            await self._end_child()
            raise LibvirtFailed("the process that talks to libvirt has ended; its reason is in this log")
        answer: dict[str, int | str] = json.loads(line)
        return answer

    async def _end_when_idle(self) -> None:
        await asyncio.sleep(self._idle_s)
        async with self._turn:
            await self._end_child()

    async def _end_child(self) -> None:
        child = self._child
        if child is not None:
            if child.returncode is None:
                child.kill()
            await child.wait()
            self._child = None
