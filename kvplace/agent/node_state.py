"""The input of the agent's decisions: the machine, the ledger and the placements at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvplace.core.ledger import Ledger
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology


@dataclass(frozen=True)
class NodeState:
    """One node, complete and consistent; every decision of the agent is a function of it."""

    node: NodeName
    topology: Topology
    """The machine as it is now: its CPUs are those that are online."""
    ledger: Ledger = field(default_factory=Ledger)
    placements: Mapping[PodUid, PodPlacement] = field(default_factory=lambda: MappingProxyType({}))
    """The newest placement of each pod of the node that has not ended."""
    confirmed: Mapping[PodUid, int] = field(default_factory=lambda: MappingProxyType({}))
    """The revision of each pod's placement that its threads were last seen to follow."""
    kubelet_cpus: CpuMask = NO_CPUS
    """CPUs that the kubelet's static policy has allocated; the agent does not write where there is one."""
    observes_only: bool = False
    """Whether the kubelet runs its static policy here."""
