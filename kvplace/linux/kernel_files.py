"""Small files of the kernel below /proc and /sys, and the reasons why one cannot be read.

Their process or cgroup may end at any moment, and a container may lack the right to read them. A reader must
not confuse the two, so each is an error of its own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Misconfigured, Unavailable
from kvplace.core.scalars import CpuMask

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ENODEV)
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)

_AT_ONCE = 64 * 1024
_LARGEST = 16 * 1024 * 1024
"""Bytes of any file of the kernel that is read here; the largest is the list of a container's processes."""


class Gone(Unavailable):
    """The file does not exist (any more): its process, cgroup or device has ended or never was."""


class NotPermitted(Misconfigured):
    """This process may not do that with the file."""


class KernelError(Unavailable):
    """The file cannot be read or written now, or has an unexpected content."""


def read_text(path: Path, most_bytes: int = _LARGEST, goes_on: Callable[[], bool] = lambda: True) -> str:
    """Read a file; raises Gone, NotPermitted or KernelError that names it.

    KernelError also for more than `most_bytes`, and where `goes_on`, which is asked after each part, states
    no.
    """
    try:
        # Thousands of them are read at a time; this takes a third of the time of Path.read_text.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = bytearray()
            while part := os.read(descriptor, _AT_ONCE):
                content += part
                if len(content) > most_bytes:
                    raise KernelError(f"{path} is larger than {most_bytes} bytes")
                if not goes_on():
                    raise KernelError(f"{path} takes too long to be read: {len(content)} bytes until now")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise explained(error, path) from None
    return content.decode(errors="replace")


def write_text(path: Path, text: str) -> None:
    """Write a file that exists; raises Gone, NotPermitted or KernelError (also for a value that the kernel
    does not accept) that names it.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise explained(error, path, f"set to {text!r}") from None


def explained(error: OSError, path: Path, done: str = "read") -> Gone | NotPermitted | KernelError:
    """Turn the reason why a file could not be read, set or watched into one of our errors."""
    if error.errno in _GONE:
        return Gone(f"{path} does not exist")
    if error.errno in _NOT_PERMITTED:
        return NotPermitted(f"{path} may not be {done}: {error.strerror}")
    return KernelError(f"{path} cannot be {done}: {error.strerror}")


def explained_call(code: int, what: str, subject: str, needs: str) -> Gone | NotPermitted | KernelError:
    """Turn the error number of a system call about a process or thread into one of our errors.

    `what` states the failure, `subject` its process or thread, and `needs` the capabilities for the call.
    """
    if code in _GONE:
        return Gone(f"{what}: there is no such {subject}")
    if code in _NOT_PERMITTED:
        return NotPermitted(f"{what}: {os.strerror(code)}; the agent needs {needs}")
    return KernelError(f"{what}: {os.strerror(code)}")


def read_cpu_list(path: Path) -> CpuMask:
    """Read a file that contains a CPU list; raises as `read_text` does."""
    return to_cpu_list(read_text(path), path)


def to_cpu_list(text: str, path: Path) -> CpuMask:
    """Read a CPU list that was found in a file; raises KernelError that names the file."""
    try:
        return parse_cpu_list(text)
    except ValueError as error:
        raise KernelError(f"{path}: {error}") from None


def allowed_cpus_of(task: Path) -> CpuMask:
    """Read the CPUs that a task may run on; `task` is its folder in /proc.

    Raises Gone, NotPermitted or KernelError.
    """
    return _status_list(task, "Cpus_allowed_list")


def allowed_memory_nodes_of(task: Path) -> int:
    """Read the NUMA nodes (a mask of ids) that a task may take memory from; raises as `allowed_cpus_of`."""
    return _status_list(task, "Mems_allowed_list")


def _status_list(task: Path, key: str) -> CpuMask:
    path = task / "status"
    for line in read_text(path).splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return to_cpu_list(value, path)
    raise KernelError(f"{path} does not contain {key}")
