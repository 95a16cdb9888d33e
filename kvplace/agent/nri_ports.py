"""Calls of enforcement through NRI to the host and to the cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvplace.agent.node_state import NodeState
from kvplace.core.scalars import CpuMask
from kvplace.linux.cpuset_hierarchy import CpusetFile


class CgroupCpusets(Protocol):
    """Calls to the host's cgroups: `kvplace.linux.cpuset_hierarchy.CpusetHierarchy`."""

    @property
    def root(self) -> Path: ...

    def configured(self, folder: Path, /) -> CpuMask: ...

    def is_set(self, folder: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS, /) -> bool: ...

    def limit(self, folder: Path, cpus: CpuMask, /) -> str: ...

    def set(self, folder: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS, /) -> None: ...


class NodeObjects(Protocol):
    """The API server's view of this node: `kvplace.agent.own_node.OwnNode`."""

    @property
    def state(self) -> NodeState: ...

    @property
    def is_known(self) -> bool: ...

    def subscribe(self, listener: Callable[[], None], /) -> None: ...

    async def wait_until_known(self) -> None: ...
