"""The containers of a host, by their cgroups, and each change of these as the kernel reports it.

Kubelets and container runtimes lay cgroups out like this. Below `kubepods` (cgroupfs driver) or
`kubepods.slice` (systemd driver), which a kubelet with `--cgroup-root` puts into another cgroup, there is one
for each pod (in the one of its QoS class unless it is Guaranteed), and in the pod's one for each container,
the pause container included:

    kubepods/burstable/pod<UID>/<id>
    kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<UID with _>.slice/cri-containerd-<id>.scope

The UID of a static pod is the hash of its manifest (32 hexadecimal digits), not the UID of its mirror pod. An
OCI spec names the cgroup of its container. Asking /proc of the first process instead would need that process
to live, and the host's cgroup namespace.

The watch reports cgroups that appear and end, and writes of any program to their cpuset files. A folder is
listed after the watch on it was set, so that nothing between the two is missed. Only `look_everywhere` finds
a `kubepods` that is made later in a cgroup below the root. Other programs may have used up the inotify of
root: then `look_everywhere` finds everything, and `obstacle` states why nothing else does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvplace.core.errors import Misconfigured
from kvplace.core.scalars import ContainerId, PodUid
from kvplace.linux.cgroups import CpusetFile
from kvplace.linux.inotify import FileChange, Inotify
from kvplace.linux.kernel_files import Gone

_KUBEPODS = re.compile(r"(?:.+-)?kubepods(?:\.slice)?", re.ASCII)
_QOS = re.compile(r"(?:.+-)?(?:burstable|besteffort)(?:\.slice)?", re.ASCII)
_UID = "[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_POD = re.compile(rf"(?:.+-)?pod({_UID})(?:\.slice)?", re.ASCII)
# CRI-O puts its monitor process into a cgroup of its own, crio-conmon-<id>.scope.
_CONTAINER = re.compile(r"(?:(?:cri-containerd|crio|docker|libpod)-)?([0-9a-f]{64})(?:\.scope)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ContainerCgroup:
    """The cgroup of one container."""

    id: ContainerId
    pod_uid: PodUid
    folder: Path


def kubepods_folders(root: Path) -> Iterator[Path]:
    """Find `kubepods`; there is one unless kubelets run beside each other.

    It is searched for in the root and in cgroups there with a name that begins with `kubelet`. A `kubepods`
    in any other cgroup belongs to a node that runs inside a container of this node.
    """
    for name in folder_names(root):
        if is_kubepods(name):
            yield root / name
        elif name.startswith("kubelet"):
            yield from (root / name / inner for inner in folder_names(root / name) if is_kubepods(inner))


def is_kubepods(name: str) -> bool:
    """Whether a cgroup contains the cgroups of all pods of a kubelet."""
    return _KUBEPODS.fullmatch(name) is not None


def is_qos_class(name: str) -> bool:
    """Whether a cgroup in `kubepods` is the cgroup of a QoS class."""
    return _QOS.fullmatch(name) is not None and _POD.fullmatch(name) is None


def pod_uid_of(name: str) -> PodUid | None:
    """Read the pod's UID from the name of its cgroup; None when it is not the cgroup of a pod."""
    found = _POD.fullmatch(name)
    return PodUid(found[1].replace("_", "-")) if found else None


def container_id_of(name: str) -> ContainerId | None:
    """Read the container's id from the name of its cgroup; None when it is not the cgroup of a container."""
    found = _CONTAINER.fullmatch(name)
    return ContainerId(found[1]) if found else None


def folder_names(folder: Path) -> list[str]:
    """List the folders in a folder, in order; none when it is gone or may not be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


_SLICE = ".slice"


def cgroup_folder(hierarchy: Path, cgroups_path: str) -> Path | None:
    """Return the folder of `linux.cgroupsPath` in a mounted hierarchy; None for one that runtimes do not use.

    It is a path, or with the systemd driver `slice:prefix:name`, which stands for the scope `prefix-name` in
    that slice. The slice `a-b.slice` is inside `a.slice` (systemd.slice(5)).
    """
    slice_, colon, scope = cgroups_path.partition(":")
    if not colon:
        parts = cgroups_path.split("/")
    else:
        prefix, _, name = scope.partition(":")
        parts = [*_slices(slice_), f"{prefix}-{name}.scope" if prefix else f"{name}.scope"]
    parts = [part for part in parts if part]
    return None if not parts or ".." in parts else hierarchy.joinpath(*parts)


def _slices(name: str) -> list[str]:
    """List a slice with its parents, outermost first; `-.slice` is the root."""
    words = name.removesuffix(_SLICE).split("-")
    return ["-".join(words[:count]) + _SLICE for count in range(1, len(words) + 1) if all(words)]


_ENTRIES = FileChange.CREATED | FileChange.REMOVED
_CPUSET_FILES = frozenset(file.value for file in CpusetFile)


@dataclass(frozen=True, slots=True)
class ContainerChanges:
    """Changes since the last check."""

    appeared: frozenset[ContainerId] = frozenset()
    """Containers with a new cgroup, also after another one."""
    written: frozenset[ContainerId] = frozenset()
    """Containers with cpuset files that were written, perhaps by ourselves."""
    everything: bool = False
    """Whether any other cpuset may have changed: a parent's has, or reports were lost."""


class ContainerWatch:
    """The containers below the root of a cgroup hierarchy."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.obstacle = ""
        """Why changes may not be reported; empty when all are."""
        self._inotify = Inotify()
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
            written=frozenset(written & now.keys()),
            everything=everything,
        )

    def look_everywhere(self) -> None:
        """List all containers again."""
        self.obstacle = ""
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
