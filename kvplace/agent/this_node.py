"""The input of the agent's plan: the machine, the ledger, the placements of pods and the containers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from kvplace.agent.given_devices import GivenDevice
from kvplace.core.ledger import Ledger
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.objects import COMPUTE
from kvplace.nri.values import NO_CPUSET, Cpuset


@dataclass(frozen=True, slots=True)
class NodeContainer:
    """One container that is created or running, as the container runtime or the cgroup tree shows it."""

    id: ContainerId
    name: str
    """Empty where only its cgroup is known and its pod is not."""
    pod_uid: PodUid
    namespace: str
    pod: str
    in_vm_pod: bool
    """Whether its pod is a virt-launcher pod."""
    placement: str = ""
    """The pod's annotation kvplace.io/placement when its sandbox was created; it may be newer by now."""
    folder: Path | None = None
    """Its folder in the hierarchy that has cpusets, which may not exist yet; None where it is not known."""
    spec: Cpuset = NO_CPUSET
    """What its runtime sets it to again with each update; empty where it does not, or is not known to."""
    cpus: CpuMask = NO_CPUS
    """The cpuset that it has now; empty where it has none of its own, or where that is not known."""
    devices: tuple[GivenDevice, ...] = ()
    """The devices that it was given; empty where its runtime does not state them."""
    incoming: bool = False
    """Whether a live migration starts its QEMU with the CPU numbers of another node, which must not fail."""

    @property
    def runs_claim(self) -> bool:
        """Whether the CPUs of the pod's claim are for this container.

        In the pod of a VM that is the container with QEMU; in a plain pod every container.
        """
        return self.name == COMPUTE or not self.in_vm_pod


@dataclass(frozen=True, slots=True)
class PodRevisions:
    """The revisions of one pod's placement, as far as this node has carried them out."""

    newest: PodPlacement
    confirmed: int = 0
    """The revision that its cpusets are narrowed to: its threads follow it, or will not of themselves."""
    followed: PodPlacement | None = None
    """The placement that this agent last saw every thread follow."""
    failure: str = ""
    """Why the newest revision was given up; empty if it was not."""

    def in_effect(self, ledger: Ledger) -> PodPlacement:
        """Return the placement that the pod is to have: its newest, or the one before if that has failed."""
        return (self.previous(ledger) if self.failure else None) or self.newest

    def previous(self, ledger: Ledger) -> PodPlacement | None:
        """Return the placement before the newest one: as seen, or after a restart from the ledger."""
        if self.followed is not None:
            return self.followed
        claim = ledger.claims.get(self.newest.pod_uid)
        return claim.relocation.previous if claim is not None and claim.relocation is not None else None


@dataclass(frozen=True)
class ThisNode:
    """One node at one moment, complete and consistent; the agent's plan is a function of it."""

    node: NodeName
    topology: Topology
    """The machine as it is now, with its online CPUs."""
    ledger: Ledger = field(default_factory=Ledger)
    pods: Mapping[PodUid, PodRevisions] = field(default_factory=lambda: MappingProxyType({}))
    """Each pod of the node that has a placement and has not ended."""
    kubelet_cpus: CpuMask = NO_CPUS
    """CPUs that the kubelet's static policy has allocated; the agent does not write where there is one."""
    observes_only: bool = False
    """Whether cpusets are only observed: by the kubelet's static policy, or by the operator's wish."""
    follows_claims: bool = False
    """Whether dra-driver-cpu gives the containers of a claim the CPUs that it owns; this is then observed."""
    is_known: bool = True
    """Whether the objects of the node have been read; until then ledger and pods lack what they state."""
