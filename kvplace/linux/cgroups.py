"""Cgroups of version 1 and 2: the cgroups of a process, the processes of a cgroup, and cpusets, read and set.

With version 1 a cgroup's set must lie in its parent's, and its children's in its own, so a change may need
several writes: first everything above grows, then everything below shrinks. With version 2 the kernel takes
the intersection by itself. Documentation/admin-guide/cgroup-v1/cpusets.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import Misconfigured
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.linux.kernel_files import Gone, KernelError, read_cpu_list, read_text, write_text

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


def folders_of(process: Path, mounted: Path, container: Path | None = None) -> dict[str, Path]:
    """Find the folders of a process's cgroup, by controller; `unified` names the folder of version 2.

    With version 2 /proc shows paths as seen from our own cgroup namespace, which runtimes make. So there the
    folder of its `container` counts, where it is known. Raises Gone, NotPermitted or KernelError.
    """
    folders: dict[str, Path] = {}
    for controllers, path in _cgroups_of(process):
        if controllers:
            folders |= dict.fromkeys(controllers.split(","), mounted / controllers / path)
        else:
            folders[UNIFIED] = mounted / path
    if container is not None and (container / "cgroup.controllers").exists():
        folders[UNIFIED] = container
    return folders


def processes_of(folder: Path) -> tuple[int, ...]:
    """List the processes of a cgroup and of the cgroups inside it; raises as `read_text` does.

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
            yield mounted / path / _EFFECTIVE[CgroupVersion.V2, CpusetFile.CPUS]
        elif "cpuset" in controllers.split(","):
            for folder in (mounted / controllers / path, mounted / controllers):
                yield folder / _EFFECTIVE[CgroupVersion.V1, CpusetFile.CPUS]
                yield folder / CpusetFile.CPUS.value


def _cgroups_of(process: Path) -> Iterator[tuple[str, str]]:
    """Read the cgroups of a process: controllers of the hierarchy (none: version 2), and path in it."""
    for line in read_text(process / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield controllers, path.lstrip("/")


class CgroupVersion(Enum):
    """Versions of the kernel's cgroup interface."""

    V1 = 1
    V2 = 2


class CpusetFile(Enum):
    """The two sets of a cgroup that can be set; the values are the names of their files."""

    CPUS = "cpuset.cpus"
    MEMORY_NODES = "cpuset.mems"


_EFFECTIVE = {
    (CgroupVersion.V1, CpusetFile.CPUS): "cpuset.effective_cpus",
    (CgroupVersion.V1, CpusetFile.MEMORY_NODES): "cpuset.effective_mems",
    (CgroupVersion.V2, CpusetFile.CPUS): "cpuset.cpus.effective",
    (CgroupVersion.V2, CpusetFile.MEMORY_NODES): "cpuset.mems.effective",
}
EFFECTIVE_CPUS = tuple(name for (_, file), name in _EFFECTIVE.items() if file is CpusetFile.CPUS)
"""Names of the file with the CPUs that a cgroup may use in effect; a cgroup has one of them."""


@dataclass(frozen=True, slots=True)
class CpusetHierarchy:
    """The mounted tree of cgroups that has the cpuset controller."""

    root: Path
    version: CgroupVersion

    def configured(self, folder: Path, file: CpusetFile = CpusetFile.CPUS) -> CpuMask:
        """Read the set of a cgroup; with version 2 it is empty where its parent's set applies.

        Raises Gone, NotPermitted or KernelError; Misconfigured where the controller is not enabled.
        """
        try:
            return read_cpu_list(folder / file.value)
        except Gone:
            self._check_enabled(folder)
            raise

    def effective(self, folder: Path, file: CpusetFile = CpusetFile.CPUS) -> CpuMask:
        """Read the CPUs or NUMA nodes that a cgroup may use in effect; raises as `configured` does."""
        try:
            return read_cpu_list(folder / _EFFECTIVE[self.version, file])
        except Gone:
            self._check_enabled(folder)
            raise

    def is_set(self, folder: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS) -> bool:
        """Whether a cgroup has exactly this set, so that nothing has to be written."""
        found = self.configured(folder, file)
        return found == wanted or (not found and self.effective(folder, file) == wanted)

    def limit(self, folder: Path, cpus: CpuMask) -> str:
        """State why a cgroup may not use these online CPUs that it is set to; empty where it may.

        With version 2 a cgroup above it can forbid it; a cgroup that may use none of its own CPUs uses the
        CPUs of its parent. Raises as `configured` does.
        """
        found = cpus if self.version is CgroupVersion.V1 else self.effective(folder)
        if found == cpus:
            return ""
        return (
            f"{folder} is set to CPU {format_cpu_list(cpus)} and may use CPU {format_cpu_list(found)}:"
            " a cgroup above it has other CPUs"
        )

    def set(self, folder: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS) -> None:
        """Give a cgroup this set, which must not be empty; its processes move at once.

        Raises Gone when the cgroup has ended, NotPermitted, or KernelError when the kernel refuses the set.
        """
        if not wanted:
            raise ValueError(f"{folder} must not get an empty {file.value}")
        if self.version is CgroupVersion.V2:
            self._write(folder, wanted, file)
            return
        before = self.configured(folder, file)
        if wanted & ~before:
            self._grow_parents(folder, wanted, file)
            # A child that may not keep its set moves to the new one before the old one goes.
            self._write(folder, before | wanted, file)
        if wanted != before:
            for child in _children(folder):
                self._follow(child, before, wanted, file)
        if before & ~wanted:
            self._write(folder, wanted, file)

    def _grow_parents(self, folder: Path, wanted: CpuMask, file: CpusetFile) -> None:
        """Let every cgroup above have at least this set; an empty one gets its parent's, as runtimes do."""
        parent = folder.parent
        if parent == self.root or self.root not in parent.parents:
            return
        before = self.configured(parent, file)
        if before and not wanted & ~before:
            return
        self._grow_parents(parent, wanted, file)
        self._write(parent, before | wanted if before else self.configured(parent.parent, file), file)

    def _follow(self, folder: Path, before: CpuMask, wanted: CpuMask, file: CpusetFile) -> None:
        """Change a cgroup inside one that changes: one that had all of it has all of it again."""
        try:
            own = self.configured(folder, file)
            target = own & wanted
            if own == before or not target:
                target = wanted
            if own and target != own:
                self.set(folder, target, file)
        except Gone:
            return

    def _write(self, folder: Path, wanted: CpuMask, file: CpusetFile) -> None:
        try:
            write_text(folder / file.value, format_cpu_list(wanted))
        except Gone:
            self._check_enabled(folder)
            raise

    def _check_enabled(self, folder: Path) -> None:
        if (folder / "cgroup.procs").exists() and not (folder / CpusetFile.CPUS.value).exists():
            raise Misconfigured(
                f"{folder} has no {CpusetFile.CPUS.value}: enable cpuset in cgroup.subtree_control above it"
            )


def find_cpuset_hierarchy(mounted: Path) -> CpusetHierarchy:
    """Find where cgroups have cpusets, below the mount point of cgroups.

    Raises Misconfigured when there is none.
    """
    for root in (mounted, mounted / "unified"):
        try:
            if "cpuset" in read_text(root / "cgroup.controllers").split():
                return CpusetHierarchy(root, CgroupVersion.V2)
        except (Gone, KernelError):
            continue
    for root in _children(mounted):
        if "cpuset" in root.name.split(",") and (root / CpusetFile.CPUS.value).exists():
            return CpusetHierarchy(root, CgroupVersion.V1)
    raise Misconfigured(f"no cgroup hierarchy with the cpuset controller is mounted below {mounted}")


def _children(folder: Path) -> list[Path]:
    """List the cgroups in a cgroup; none when it is gone."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []
