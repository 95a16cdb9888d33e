"""CPUs and memory that a task (a process or a thread) may use, from /proc/PID/status and its tasks'."""

from __future__ import annotations

from pathlib import Path

from kvplace.core.scalars import CpuMask
from kvplace.linux.kernel_files import KernelError, read_text, to_cpu_list


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
