"""The calls of the agent's other components to the one that sets cpusets on this node."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from kvplace.agent.containers import Container
from kvplace.agent.cpusets import Cpusets
from kvplace.core.scalars import ContainerId


class EnforcedContainers(Protocol):
    """The containers of this node and the cpusets that were decided for them."""

    def containers(self) -> Iterable[Container]:
        """Return the containers that are created or running, as last known."""
        ...

    def cpusets(self) -> Cpusets:
        """Return the last decision; the same object until there is another one."""
        ...

    def cgroup_of(self, container: ContainerId) -> Path:
        """Find a container's folder in the hierarchy that has cpusets.

        The folder may not exist yet or any more. Raises Gone when it is not known.
        """
        ...
