"""Events of the kernel about devices: a CPU that goes offline, memory that is plugged in.

The kernel broadcasts them to every network namespace of the initial user namespace, so a pod of its own
network receives them, too (Documentation/core-api/kobject.rst, lib/kobject_uevent.c).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

NETLINK_KOBJECT_UEVENT = 15
_FROM_KERNEL = 1
"""The multicast group of the kernel; udev repeats events in another one."""
_LONGEST = 8192
"""The kernel's own limit is 2048 bytes of variables and a path."""


class Uevents:
    """A socket that receives the kernel's events; `fileno` is for an event loop."""

    def __init__(self) -> None:
        """Open it; raises OSError where that is not allowed."""
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, NETLINK_KOBJECT_UEVENT
        )
        try:
            self._socket.bind((0, _FROM_KERNEL))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def subsystems(self) -> Iterator[str]:
        """Give the subsystem of each event that has arrived; empty for events that were lost."""
        while True:
            try:
                message, (sender, _) = self._socket.recvfrom(_LONGEST)
            except BlockingIOError:
                return
            except OSError:  # ENOBUFS: there were more than the buffer holds
                yield ""
                continue
            if sender == 0:  # other processes have a port of their own
                yield _subsystem(message)


def _subsystem(message: bytes) -> str:
    for variable in message.split(b"\0"):
        if variable.startswith(b"SUBSYSTEM="):
            return variable[len(b"SUBSYSTEM=") :].decode(errors="replace")
    return ""
