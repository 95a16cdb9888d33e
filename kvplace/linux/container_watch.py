"""The containers of a host, kept up to date without polling: the kernel reports each change of their cgroups.

What is reported: cgroups that appear and end, and writes of any program to their cpuset files. A folder
is listed after the watch on it was set, so that nothing between the two is missed. A `kubepods` that is made
later in a cgroup below the root is found by `look_everywhere` only. Other programs may have used up the
inotify of root: then `look_everywhere` finds everything, and `obstacle` states why nothing else does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvplace.core.errors import Misconfigured
from kvplace.core.scalars import ContainerId
from kvplace.linux.container_cgroups import (
    ContainerCgroup,
    container_id_of,
    folder_names,
    is_kubepods,
    is_qos_class,
    kubepods_folders,
    pod_uid_of,
)
from kvplace.linux.cpuset_hierarchy import CpusetFile
from kvplace.linux.kernel_events import FileChange, FileReport, Inotify
from kvplace.linux.kernel_files import Gone

_ENTRIES = FileChange.CREATED | FileChange.REMOVED
_CPUSET_FILES = frozenset(file.value for file in CpusetFile)


@dataclass(frozen=True, slots=True)
class ContainerChanges:
    """Changes since the last check."""

    appeared: frozenset[ContainerId] = frozenset()
    """Containers with a new cgroup, also after another one."""
    ended: frozenset[ContainerId] = frozenset()
    written: frozenset[ContainerId] = frozenset()
    """Containers with cpuset files that were written, perhaps by ourselves."""
    everything: bool = False
    """Whether any other cpuset may have changed: that of a parent, or reports were lost."""


class ContainerWatch:
    """The containers below the root of a cgroup hierarchy."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.obstacle = ""
        """Why changes may not be reported; empty when all are."""
        self._no_inotify_because = ""
        self._inotify: Inotify | _NoInotify
        try:
            self._inotify = Inotify()
        except Misconfigured as error:
            self._inotify, self._no_inotify_because = _NoInotify(), str(error)
        self._containers: dict[ContainerId, ContainerCgroup] = {}
        self._by_folder: dict[Path, ContainerId] = {}
        self._appeared: set[ContainerId] = set()
        self.look_everywhere()

    @property
    def containers(self) -> Mapping[ContainerId, ContainerCgroup]:
        """The containers by their id, as of the last `read`."""
        return MappingProxyType(self._containers)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there are changes."""
        return self._inotify.fileno()

    def close(self) -> None:
        """Stop watching."""
        self._inotify.close()

    def read(self) -> ContainerChanges:
        """Take in the reports of the kernel; does not wait."""
        before = set(self._containers)
        self._appeared.clear()
        written: set[ContainerId] = set()
        everything = False
        for report in self._inotify.read():
            path = report.folder / report.name
            if report.change & FileChange.OVERFLOW:
                self.look_everywhere()
                everything = True
            elif report.change & FileChange.WRITTEN:
                if report.name in _CPUSET_FILES:
                    container = self._by_folder.get(report.folder)
                    everything |= container is None
                    written |= set() if container is None else {container}
            elif report.change & FileChange.REMOVED:
                self._inotify.forget(path)
                self._ended(path)
            elif report.change & FileChange.CREATED and report.change & FileChange.FOLDER:
                self._look(path)
        now = self._containers
        return ContainerChanges(
            appeared=frozenset(self._appeared & now.keys()),
            ended=frozenset(before - now.keys()),
            written=frozenset(written & now.keys()),
            everything=everything,
        )

    def look_everywhere(self) -> None:
        """List all containers again."""
        self.obstacle = self._no_inotify_because
        for container in [each for each in self._containers.values() if not each.folder.exists()]:
            self._ended(container.folder)
        for folder in self._inotify.folders:
            if not folder.exists():
                self._inotify.forget(folder)
        self._watch(self._root, FileChange.CREATED)
        for folder in kubepods_folders(self._root):
            self._look_into(folder)

    def _look_into(self, folder: Path) -> None:
        """Watch a cgroup that contains cgroups of pods, and take in its content."""
        if self._watch(folder, _ENTRIES | FileChange.WRITTEN):
            for name in folder_names(folder):
                self._look(folder / name)

    def _look(self, folder: Path) -> None:
        """Take in a cgroup of any kind."""
        uid = pod_uid_of(folder.parent.name)
        if uid is not None:
            container = container_id_of(folder.name)
            if container is not None and self._watch(folder, FileChange.WRITTEN):
                if self._by_folder.get(folder) != container:
                    self._appeared.add(container)
                self._containers[container] = ContainerCgroup(container, uid, folder)
                self._by_folder[folder] = container
        elif pod_uid_of(folder.name) is not None or is_qos_class(folder.name) or is_kubepods(folder.name):
            self._look_into(folder)

    def _watch(self, folder: Path, changes: FileChange) -> bool:
        try:
            self._inotify.watch(folder, changes)
        except Gone:
            return False
        except Misconfigured as error:
            self.obstacle = str(error)
        return True

    def _ended(self, folder: Path) -> None:
        container = self._by_folder.pop(folder, None)
        if container is not None and self._containers[container].folder == folder:
            del self._containers[container]


class _NoInotify:
    """Stands in where there is no inotify."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0)
        self.folders: tuple[Path, ...] = ()

    def fileno(self) -> int:
        return self._descriptor

    def watch(self, folder: Path, changes: FileChange) -> None:
        pass

    def forget(self, folder: Path) -> None:
        pass

    def read(self) -> list[FileReport]:
        return []

    def close(self) -> None:
        os.close(self._descriptor)
