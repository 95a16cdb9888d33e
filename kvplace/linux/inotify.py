"""Changes in folders as the kernel reports them (inotify(7)).

Only writes, creations and removals by processes are reported. A file of the kernel with content that changes
by itself, as cpusets do when a CPU goes offline, is not. A cgroup that was removed stays watched, and counts
towards the user's limit of watches, until `forget`. inotify is three calls of libc. The packages for it start
a process to find libc and follow trees in ways that miss folders; neither is needed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

from kvplace.core.errors import Misconfigured
from kvplace.linux.kernel_files import Gone, explained

log = logging.getLogger(__name__)

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
    """A queue of changes of the folders that are watched; readable (select, asyncio) when it has some.

    Other programs of the user may have used up all queues. Then it stays empty, and `watch` states why.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._unusable = ""
        if self._descriptor < 0:
            why = os.strerror(ctypes.get_errno())
            self._unusable = f"inotify cannot be used: {why}; see fs.inotify.max_user_instances"
            self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._folders: dict[int, Path] = {}
        self._numbers: dict[Path, int] = {}

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._descriptor

    def watch(self, folder: Path, changes: FileChange) -> None:
        """Report changes from now on; once more for the same folder is not an error.

        Raises Gone or NotPermitted, or Misconfigured when the user's limit of queues or watches is reached.
        """
        if self._unusable:
            raise Misconfigured(self._unusable)
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


@contextlib.contextmanager
def calling(arrived: Callable[[list[FileReport]], None], inotify: Inotify) -> Iterator[None]:
    """Call `arrived` in the running event loop with each batch of changes; closes the queue at the end."""
    loop = asyncio.get_running_loop()
    with contextlib.closing(inotify):
        loop.add_reader(inotify.fileno(), lambda: arrived(inotify.read()))
        try:
            yield
        finally:
            loop.remove_reader(inotify.fileno())


@contextlib.contextmanager
def noticing(
    arrived: Callable[[list[FileReport]], None], folders: Iterable[Path], changes: FileChange, otherwise: str
) -> Iterator[None]:
    """Call `arrived` with the changes of folders; `otherwise` is logged where they cannot be watched.

    A folder that does not exist is left out.
    """
    inotify = Inotify()
    for folder in folders:
        try:
            inotify.watch(folder, changes)
        except Gone:
            pass
        except Misconfigured as error:
            log.warning("%s; %s", error, otherwise)
    with calling(arrived, inotify):
        yield
