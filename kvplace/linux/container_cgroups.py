"""The cgroups of containers as kubelets and container runtimes lay them out, and as an OCI spec names them.

Below `kubepods` (cgroupfs driver) or `kubepods.slice` (systemd driver), which a kubelet with `--cgroup-root`
puts into another cgroup, there is one for each pod (in one of its QoS class unless it is Guaranteed) and in
that one for each container, the pause container included:

    kubepods/burstable/pod<UID>/<id>
    kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<UID with _>.slice/cri-containerd-<id>.scope

The UID of a static pod is the hash of its manifest (32 hexadecimal digits), not that of its mirror pod.

An OCI spec names the cgroup of its container. Asking /proc of the first process instead would need that
process to live, and the host's cgroup namespace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvplace.core.scalars import ContainerId, PodUid

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

    It is searched for in the root and in cgroups there with a name that begins with `kubelet`. What other
    cgroups contain belongs to nodes that run inside of containers of this one.
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
    """Whether a cgroup in `kubepods` is that of a QoS class."""
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
