"""The kernel's settings of a node's containers, read from outside of it.

Written apart from kvplace's own reading of control groups and /proc on purpose: a mistake there must not hide
here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from harness.control_plane.pod_status import container_statuses
from harness.libvirt_session.threads import Affinities
from harness.real_node.sandbox import Sandbox
from kvplace.core.cpuset import parse_cpu_list

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ContainerInKernel:
    """The control groups of one running container."""

    sandbox: Sandbox
    inside: Path
    """Below the root of each of the node's hierarchies."""

    @classmethod
    def of_pod(cls, sandbox: Sandbox, pod: Json, name: str) -> ContainerInKernel:
        """Find a pod's container by its name; raises `LookupError` when it does not run."""
        ids = [status.get("containerID", "") for status in container_statuses(pod) if status["name"] == name]
        if not ids or not ids[0]:
            raise LookupError(f"container {name} of {pod['metadata']['name']} does not run")
        container = ids[0].rpartition("/")[2]
        root = sandbox.groups.cpuset
        for folder, _, _ in os.walk(root):
            if folder.endswith(f"/{container}"):
                return cls(sandbox, Path(folder).relative_to(root))
        raise LookupError(f"container {name} of {pod['metadata']['name']} has no cpuset")

    @property
    def cpuset_group(self) -> Path:
        """Its group in the hierarchy of cpusets."""
        return self.sandbox.groups.cpuset / self.inside

    def cpus(self) -> int:
        """The CPUs that its cpuset gives it."""
        return parse_cpu_list((self.cpuset_group / "cpuset.effective_cpus").read_text().strip())

    def write_cpus(self, cpus: str) -> None:
        """Write its cpuset as a program of the node would.

        Through the node's own mount: a watch of a file there sees no write through another mount.
        """
        mount = self.sandbox.path(self.sandbox.groups.cpuset.parent)
        (mount / self.inside / "cpuset.cpus").write_text(cpus)

    def pids(self) -> list[int]:
        """Its processes, as this machine counts."""
        return [int(line) for line in (self.cpuset_group / "cgroup.procs").read_text().split()]

    def time_on_cpus(self) -> list[int]:
        """Nanoseconds that its processes have used of each CPU since it was made."""
        accounting = self.sandbox.groups.with_file("cpuacct.usage_percpu") / self.inside
        return [int(word) for word in (accounting / "cpuacct.usage_percpu").read_text().split()]

    def process(self, pattern: str) -> int:
        """The first process in it with a matching name; raises `LookupError` when there is none."""
        for pid in self.pids():
            if fnmatchcase(_name(pid), pattern):
                return pid
        raise LookupError(f"no process {pattern} in {self.inside}")

    def qemu(self) -> int:
        """The QEMU in it; raises `LookupError` when there is none."""
        return self.process("qemu-system*")

    def qemu_threads(self) -> Affinities:
        """Every thread of the QEMU in it with the CPUs that the kernel lets it use."""
        return Affinities.of_process(self.qemu())


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
