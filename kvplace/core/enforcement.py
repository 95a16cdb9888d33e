"""How a node keeps other containers off owned CPUs, as its agent reports in the NodeTopology."""

from __future__ import annotations

from enum import Enum


class Enforcement(Enum):
    """The mechanism that sets cpusets on a node: `status.enforcement` of its NodeTopology."""

    NONE = "none"
    """Nothing: there is no agent, or it only observes."""
    NRI = "nri"
    """The agent's NRI plugin, from the first instruction of every container."""
    CGROUP = "cgroup"
    """The agent writes cgroups after a container was created."""
