"""Events of the kernel, so that nothing has to poll: changes in folders, and of devices.

Folders (inotify(7)): only writes, creations and removals by processes are reported. A file of the kernel with
content that changes by itself, as cpusets do when a CPU goes offline, is not. A cgroup that was removed stays
watched, and counts towards the user's limit of watches, until `forget`. These are three calls of libc. The
packages for it start a process to find libc and follow trees in ways that miss folders; neither is needed
here.

Devices: a CPU that goes offline, memory that is plugged in. The kernel broadcasts these to every network
namespace of the initial user namespace, so a pod of its own network receives them, too
(Documentation/core-api/kobject.rst, lib/kobject_uevent.c).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

from kvplace.core.errors import Misconfigured
from kvplace.linux.kernel_files import explained

_HEADER = struct.Struct("iIII")
_BUFFER = 64 * 1024


class FileChange(IntFlag):
    """Kinds of changes in a folder; the values are the kernel's."""

    WRITTEN = 0x2
    MOVED_HERE = 0x80
    CREATED = 0x100
    REMOVED = 0x200
    OVERFLOW = 0x4000
    """Reports were lost: check everything again."""
    IGNORED = 0x8000
    """The folder itself is gone."""
    FOLDER = 0x40000000
    """Set with another one when it happened to a folder."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """One change; `folder` and `name` are empty with OVERFLOW."""

    folder: Path
    name: str
    change: FileChange


class Inotify:
    """A queue of changes of the folders that are watched; readable (select, asyncio) when it has some."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor < 0:
            why = os.strerror(ctypes.get_errno())
            raise Misconfigured(f"inotify cannot be used: {why}; see fs.inotify.max_user_instances")
        self._folders: dict[int, Path] = {}
        self._numbers: dict[Path, int] = {}

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._descriptor

    def watch(self, folder: Path, changes: FileChange) -> None:
        """Report changes from now on; once more for the same folder is not an error.

        Raises Gone or NotPermitted, or Misconfigured when the user's limit of watches is reached.
        """
        number = self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), int(changes))
        if number < 0:
            code = ctypes.get_errno()
            if code == errno.ENOSPC:
                raise Misconfigured(f"{folder} cannot be watched: raise fs.inotify.max_user_watches")
            raise explained(OSError(code, os.strerror(code)), folder, "watched")
        self._folders[number] = folder
        self._numbers[folder] = number

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that are watched."""
        return tuple(self._numbers)

    def forget(self, folder: Path) -> None:
        """Report no more changes of a folder; one that is not watched is not an error."""
        number = self._numbers.pop(folder, None)
        if number is not None:
            self._libc.inotify_rm_watch(self._descriptor, number)  # fails when the kernel has ended it

    def read(self) -> list[FileReport]:
        """Take the changes out of the queue, oldest first; none when there are none now."""
        try:
            content = os.read(self._descriptor, _BUFFER)
        except BlockingIOError:
            return []
        reports = []
        position = 0
        while position < len(content):
            number, mask, _cookie, length = _HEADER.unpack_from(content, position)
            position += _HEADER.size
            name = content[position : position + length].rstrip(b"\0")
            position += length
            change = FileChange(mask)
            folder = self._folders.get(number, Path())
            if change & FileChange.IGNORED:
                self._folders.pop(number, None)
                if self._numbers.get(folder) == number:
                    del self._numbers[folder]
            reports.append(FileReport(folder, os.fsdecode(name), change))
        return reports

    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)


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


@contextlib.contextmanager
def calling(arrived: Callable[[], None], events: Inotify | Uevents) -> Iterator[None]:
    """Call `arrived` in the running event loop whenever there are events to read; closes them at the end."""
    loop = asyncio.get_running_loop()
    with contextlib.closing(events):
        loop.add_reader(events.fileno(), arrived)
        try:
            yield
        finally:
            loop.remove_reader(events.fileno())


def _subsystem(message: bytes) -> str:
    for variable in message.split(b"\0"):
        if variable.startswith(b"SUBSYSTEM="):
            return variable[len(b"SUBSYSTEM=") :].decode(errors="replace")
    return ""
