"""The cpuset of a process's cgroup, of version 2 or 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.linux.kernel_files import Gone, KernelError, read_cpu_list, read_text

MOUNT_POINT = "fs/cgroup"
"""Where cgroup file systems are mounted below /sys."""
UNIFIED = "unified"
"""The name of the hierarchy of version 2 among the folders of a process."""


def effective_cpus(process: Path, mounted: Path) -> CpuMask:
    """Read the CPUs that the cgroup of a process lets it use; none where no cpuset is in effect.

    `process` is its folder in /proc, `mounted` where cgroups are mounted. Raises Gone when the process is
    gone, NotPermitted when its cgroup may not be read, KernelError for contents that make no sense.
    """
    for path in _cpuset_files(process, mounted):
        try:
            if cpus := read_cpu_list(path):
                return cpus
        except Gone:
            continue  # the controller is not enabled here, or this is not where the cgroup is mounted
    return NO_CPUS


def folders_of(process: Path, mounted: Path) -> dict[str, Path]:
    """Find the folders of a process's cgroup, by controller; that of version 2 is named `unified`.

    Raises Gone, NotPermitted or KernelError.
    """
    folders: dict[str, Path] = {}
    for controllers, path in _cgroups_of(process):
        if controllers:
            folders |= dict.fromkeys(controllers.split(","), mounted / controllers / path)
        else:
            folders[UNIFIED] = mounted / path
    return folders


def processes_of(folder: Path) -> tuple[int, ...]:
    """List the processes of a cgroup and of those inside it; raises as `read_text` does.

    With version 2 and systemd, crun puts all processes of a container into a cgroup `container` inside it.
    """
    found = _own_processes(folder)
    for above, names, _ in os.walk(folder):
        for name in names:
            with suppress(Gone, KernelError):  # ended, or threaded: its processes are listed above it
                found += _own_processes(Path(above, name))
    return tuple(found)


def _own_processes(folder: Path) -> list[int]:
    return [int(line) for line in read_text(folder / "cgroup.procs").split() if line.isdigit()]


def _cpuset_files(process: Path, mounted: Path) -> Iterator[Path]:
    """Where the cpuset may be, most specific first.

    Inside a cgroup namespace the path of our own cgroup is `/`. In a container with version 1 and without a
    namespace the path is the host's while the mount shows our own cgroup at its root.
    """
    for controllers, path in _cgroups_of(process):
        if not controllers:
            yield mounted / path / "cpuset.cpus.effective"
        elif "cpuset" in controllers.split(","):
            for folder in (mounted / controllers / path, mounted / controllers):
                yield folder / "cpuset.effective_cpus"
                yield folder / "cpuset.cpus"


def _cgroups_of(process: Path) -> Iterator[tuple[str, str]]:
    """Read the cgroups of a process: controllers of the hierarchy (none: version 2), and path in it."""
    for line in read_text(process / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield controllers, path.lstrip("/")
