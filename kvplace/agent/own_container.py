"""The agent's own container; with a cgroup namespace of its own it may not write its cpuset.

With version 2 and the mount option `nsdelegate`, which systemd uses, the kernel refuses writes to the root of
a cgroup namespace from inside it (cgroup-v2.rst, delegation). Runtimes give such a namespace to containers
that are not privileged. The agent then sets its own threads instead.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kvplace.core.scalars import CpuMask
from kvplace.linux.affinity import OutsideCpuset, Tid, set_affinity
from kvplace.linux.cgroup import processes_of
from kvplace.linux.kernel_files import Gone


def set_own_threads(folder: Path, cpus: CpuMask, own_pid: int) -> bool:
    """Set every thread of the agent's container; False, and nothing set, for the cgroup of another one.

    Raises Gone, NotPermitted or Unreadable.
    """
    pids = processes_of(folder)
    if own_pid not in pids:
        return False
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(Gone, OutsideCpuset):
                    set_affinity(Tid(int(thread.name)), cpus)
    return True
