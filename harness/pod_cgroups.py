"""Real cgroups with real processes in them, laid out as kubelets and container runtimes do."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from harness.real_node.control_groups import NodeGroups, is_left_over
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.scalars import ContainerId, PodUid
from kvplace.linux.cgroups import CgroupVersion, CpusetHierarchy, find_cpuset_hierarchy

MOUNTED = Path("/sys/fs/cgroup")
_NAME = "kvplace-pods"
GUARANTEED = ""
"""The QoS class without a cgroup of its own."""


class Driver(Enum):
    """The ways of kubelets to name cgroups."""

    CGROUPFS = "cgroupfs"
    SYSTEMD = "systemd"


def container_id(number: int) -> ContainerId:
    """An id of the length that runtimes use."""
    return ContainerId(f"{number:064x}")


def pod_uid(number: int) -> PodUid:
    """A UID as the API server makes them."""
    return PodUid(f"0b7a5f5e-0000-4000-8000-{number:012x}")


@dataclass
class PodCgroups:
    """A `kubepods` tree below `base`, a cgroup of its own in the machine's hierarchy."""

    hierarchy: CpusetHierarchy
    base: Path
    driver: Driver = Driver.CGROUPFS
    runtime: str = "cri-containerd"
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Started by `process`."""

    @property
    def own(self) -> CpusetHierarchy:
        """The hierarchy as an agent would see it if `base` were its root."""
        return CpusetHierarchy(self.base, self.hierarchy.version)

    def pod(self, uid: PodUid, qos: str = "burstable") -> Path:
        """The cgroup of a pod, made when it is not there yet."""
        if self.driver is Driver.CGROUPFS:
            path = Path("kubepods", qos, f"pod{uid}")
        else:
            names = ["kubepods", *([qos] if qos else []), f"pod{uid.replace('-', '_')}"]
            path = Path(*("-".join(names[: end + 1]) + ".slice" for end in range(len(names))))
        folder = self.base
        for part in path.parts:
            folder /= part
            self.make(folder)
        return folder

    def container(self, uid: PodUid, id_: ContainerId, qos: str = "burstable") -> Path:
        """The cgroup of a container, made as runc makes it."""
        name = id_ if self.driver is Driver.CGROUPFS else f"{self.runtime}-{id_}.scope"
        return self.make(self.pod(uid, qos) / name)

    def make(self, folder: Path) -> Path:
        """Make one cgroup with its parent's cpuset."""
        if not folder.exists():
            folder.mkdir()
            if self.hierarchy.version is CgroupVersion.V1:
                for name in ("cpuset.mems", "cpuset.cpus"):
                    if not (folder / name).read_text().strip():  # an agent may have been faster
                        (folder / name).write_text((folder.parent / name).read_text())
            else:
                there = (folder.parent / "cgroup.controllers").read_text().split()
                wanted = [f"+{name}" for name in ("cpuset", "memory") if name in there]
                (folder.parent / "cgroup.subtree_control").write_text(" ".join(wanted))
        return folder

    def process(self, folder: Path, *command: str) -> subprocess.Popen[bytes]:
        """A process that is in the cgroup from the first instruction of its program on."""
        enter = 'echo $$ > "$0"/cgroup.procs && echo && exec "$@"'
        child = subprocess.Popen(
            ["sh", "-c", enter, folder, *(command or ("sleep", "600"))], stdout=subprocess.PIPE
        )
        self.processes.append(child)
        assert child.stdout is not None
        assert child.stdout.readline(), f"no process can be put into {folder}"
        return child

    def remove(self, folder: Path) -> None:
        """End a cgroup, the cgroups in it and their processes."""
        for inner in [entry for entry in folder.iterdir() if entry.is_dir()]:
            self.remove(inner)
        members = (folder / "cgroup.procs").read_text().split()
        for child in [child for child in self.processes if str(child.pid) in members]:
            _end(child)
        folder.rmdir()

    def close(self) -> None:
        """End everything."""
        for child in self.processes:
            _end(child)
        _remove_empty(self.base)


@contextmanager
def pod_cgroups(driver: Driver = Driver.CGROUPFS, mounted: Path = MOUNTED) -> Iterator[PodCgroups]:
    """A tree of its own for one test; raises Misconfigured or OSError where none can be made."""
    hierarchy = find_cpuset_hierarchy(mounted)
    for left in hierarchy.root.glob(f"{_NAME}-*"):
        if is_left_over(left):
            for procs in left.rglob("cgroup.procs"):
                for pid in procs.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            NodeGroups((left,)).remove()
    tree = PodCgroups(hierarchy, hierarchy.root / f"{_NAME}-{os.getpid()}", driver)
    tree.make(tree.base)
    try:
        yield tree
    finally:
        tree.close()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _remove_empty(folder: Path) -> None:
    for inner in [entry for entry in folder.iterdir() if entry.is_dir()]:
        _remove_empty(inner)
    folder.rmdir()


def allowed(pid: int) -> str:
    """The CPUs that the kernel lets a process use."""
    return format_cpu_list(mask_of(os.sched_getaffinity(pid)))
