"""CPUs and memory nodes that a thread may use, by system calls and as /proc states them.

A system call that reads the CPUs costs less than 1 µs; /proc/PID/status, which states the same, costs 40
times as much. CPUs that are offline are left out, as the scheduler leaves them out.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NewType

from kvplace.core.cpuset import bits_of, format_cpu_list, mask_of
from kvplace.core.scalars import CpuMask
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted, read_text, to_cpu_list

Tid = NewType("Tid", int)
"""The id of a thread; that of a process's first thread is the process id."""


class OutsideCpuset(KernelError):
    """None of the CPUs is online and in the cpuset of the thread, so the kernel refuses them."""


def affinity_of(tid: Tid) -> CpuMask:
    """Read the online CPUs that a thread may run on; raises Gone or NotPermitted."""
    try:
        return mask_of(os.sched_getaffinity(tid))
    except OSError as error:
        raise _explained(error, f"the affinity of thread {tid} cannot be read") from None


def set_affinity(tid: Tid, cpus: CpuMask) -> None:
    """Let a thread run on these CPUs only, as far as its cpuset has them.

    Raises Gone, NotPermitted, or OutsideCpuset when its cpuset has none of them.
    """
    try:
        os.sched_setaffinity(tid, bits_of(cpus))
    except OSError as error:
        what = f"thread {tid} cannot be set to CPU {format_cpu_list(cpus)}"
        if error.errno == errno.EINVAL:
            raise OutsideCpuset(f"{what}: its cpuset has none of them online") from None
        raise _explained(error, what) from None


def _explained(error: OSError, what: str) -> Exception:
    match error.errno:
        case errno.ESRCH:
            return Gone(f"{what}: there is no such thread")
        case errno.EPERM | errno.EACCES:
            return NotPermitted(f"{what}: {error.strerror}; the agent needs CAP_SYS_NICE")
        case _:
            return KernelError(f"{what}: {error.strerror}")


def allowed_cpus(task: Path) -> CpuMask:
    """Read the CPUs that a task may run on; `task` is its folder in /proc.

    Raises Gone, NotPermitted or KernelError.
    """
    return _status_list(task, "Cpus_allowed_list")


def allowed_memory_nodes(task: Path) -> int:
    """Read the NUMA nodes, as a mask of ids, that a task may take memory from; raises as `allowed_cpus`."""
    return _status_list(task, "Mems_allowed_list")


def _status_list(task: Path, key: str) -> CpuMask:
    path = task / "status"
    for line in read_text(path).splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return to_cpu_list(value, path)
    raise KernelError(f"{path} does not contain {key}")
