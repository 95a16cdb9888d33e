"""An NRI runtime's reports to a plugin about pods and containers, and the plugin's requests to it.

These are the few fields that kvplace uses. Nothing outside this package sees protocol buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NewType

from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, PodUid

SandboxId = NewType("SandboxId", str)
"""The id of a pod sandbox in its runtime."""
DEFAULT_REQUEST_TIMEOUT_S = 2.0
"""How long runtimes wait for a plugin unless configured otherwise."""


class NriEvent(IntEnum):
    """Events that a plugin can subscribe to; the numbers are NRI's."""

    RUN_POD = 1
    STOP_POD = 2
    REMOVE_POD = 3
    CREATE = 4
    POST_CREATE = 5
    START = 6
    POST_START = 7
    UPDATE = 8
    POST_UPDATE = 9
    STOP = 10
    REMOVE = 11


@dataclass(frozen=True, slots=True)
class Cpuset:
    """The CPUs and memory nodes of a container's cgroup; empty means not set, or in an update no change."""

    cpus: CpuMask = NO_CPUS
    memory_nodes: CpuMask = NO_CPUS
    """The NUMA nodes, a mask as of CPUs."""

    def updated(self, change: Cpuset) -> Cpuset:
        """Return this cpuset after an update."""
        return Cpuset(change.cpus or self.cpus, change.memory_nodes or self.memory_nodes)


NO_CPUSET = Cpuset()


@dataclass(frozen=True, slots=True)
class PodSandbox:
    """A pod in the runtime."""

    id: SandboxId
    name: str
    namespace: str
    uid: PodUid
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """As they were when the sandbox was made; later changes of the pod do not reach the runtime."""


@dataclass(frozen=True, slots=True)
class NriContainer:
    """A container in the runtime; pause containers are not among them."""

    id: ContainerId
    sandbox: SandboxId
    name: str
    has_stopped: bool = False
    mounts: frozenset[str] = frozenset()
    """Where something is mounted in it."""
    environment: tuple[str, ...] = ()
    """`NAME=value`, as its program will have it."""
    cdi_devices: tuple[str, ...] = ()
    """Names of the Container Device Interface, such as `vendor.com/class=name`."""
    cgroup_path: str = ""
    """As in the OCI spec: a path, or `slice:prefix:name` with the systemd driver."""
    cpuset: Cpuset = NO_CPUSET
    """As in the OCI spec; the cgroup may state something else."""


@dataclass(frozen=True, slots=True)
class ContainerUpdate:
    """New CPUs or memory nodes for an existing container."""

    container: ContainerId
    cpuset: Cpuset


@dataclass(frozen=True, slots=True)
class Creation:
    """The answer to the creation of a container."""

    cpuset: Cpuset = NO_CPUSET
    """For the new container."""
    updates: tuple[ContainerUpdate, ...] = ()
    """For others; one that names the new container would make its creation fail."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The runtime at the other end."""

    name: str
    version: str
    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    """A plugin that answers later is disconnected, and its container is created without it."""
