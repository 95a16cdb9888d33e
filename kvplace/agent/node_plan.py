"""The input and the output of the agent's plan, as values.

The input is the machine, the ledger, the placements of pods and the containers. `planner` makes the plan: the
cpuset of every container, and the state of every pod with a placement. The keeper of cpusets carries out the
plan for containers, the guard of threads the plan for pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from kvplace.agent.conditions import PinnedReason
from kvplace.core.cpuset import mask_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.objects import COMPUTE
from kvplace.linux.threads import ThreadName, ThreadRole
from kvplace.nri.values import NO_CPUSET, Cpuset


@dataclass(frozen=True, slots=True, order=True)
class GivenDevice:
    """A device as its container sees it."""

    variable: str
    """The resource as names of variables have it: INTEL_COM_VF for intel.com/vf."""
    address: str
    """PCI address or UUID of a mediated device."""


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
    """The cpuset that its runtime applies again with each update; empty where none is known."""
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
    """The revision that its cpusets are narrowed to: its threads follow it, or never will by themselves."""
    followed: PodPlacement | None = None
    """The placement that this agent last saw every thread follow."""
    failure: str = ""
    """Why the newest revision was given up; empty if it was not."""

    def in_effect(self, ledger: Ledger) -> PodPlacement:
        """Return the placement that the pod is to have: the one before its newest if that has failed."""
        return (self.previous(ledger) if self.failure else None) or self.newest

    def previous(self, ledger: Ledger) -> PodPlacement | None:
        """Return the placement before the newest one: as seen, or after a restart from the ledger."""
        if self.followed is not None:
            return self.followed
        claim = ledger.claims.get(self.newest.pod_uid)
        return claim.relocation.previous if claim is not None and claim.relocation is not None else None

    def was_carried_out(self, placement: PodPlacement, ledger: Ledger) -> bool:
        """Whether an agent before this one has carried a placement out: its relocation is over."""
        claim = ledger.claims.get(self.newest.pod_uid)
        is_over = claim is not None and claim.relocation is None and claim.revision >= placement.revision
        return self.followed is None and is_over

    def with_newest(self, newest: PodPlacement) -> PodRevisions:
        """Return the record once another placement is the newest: it has not failed."""
        return replace(self, newest=newest, failure="")


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
    """Whether the objects of the node have been read; until then ledger and pods are not complete."""


THREADS_BESIDE_VCPUS = 1024
"""Threads that a QEMU may have beside two for each vCPU: I/O, vhost, migration and its pool of workers."""


@dataclass(frozen=True, slots=True)
class ClaimRefusal:
    """Why the claim of one pod does not get its CPUs."""

    reason: PinnedReason
    message: str
    """One sentence for the owner of the refused pod, without names of other tenants."""
    owner: str = ""
    """The pod that has its CPUs, for the log of the node."""


@dataclass(frozen=True, slots=True)
class ClaimContainer:
    """A container that runs a claim."""

    name: str
    """Each container of the pod has another one."""
    cgroup: Path
    """Its folder in the hierarchy that has cpusets."""


@dataclass(frozen=True, slots=True)
class PodPlan:
    """One pod with a placement and with containers here, as it is to be."""

    uid: PodUid
    namespace: str
    pod: str
    vm: bool
    """Whether it is the pod of a VM; the threads of other pods have no CPUs of their own."""
    bound: PodPlacement
    """The placement in effect."""
    online: CpuMask
    containers: tuple[ClaimContainer, ...] = ()
    """Containers that run its claim and have a cgroup, by name."""
    cpuset: CpuMask = NO_CPUS
    """The cpuset of the containers that run its claim; none where nothing sets it.

    For policy `numa`, and without a placement of its own, the threads may use all of it.
    """
    confirmed: int = 0
    """The revision that this plan narrows its cpuset to; 0: none."""
    failed_revision: int = 0
    """The newest revision of its placement, if that was given up."""
    failure: str = ""
    """Why it was."""
    refusal: ClaimRefusal | None = None
    """Why it does not get its CPUs; none of its threads are set then."""
    sets_threads: bool = True
    """False on a node that is only observed."""
    reach: CpuMask = NO_CPUS
    """CPUs that its threads may use as far as no other pod owns them."""
    has_its_cpus: bool = False
    """Whether one of its containers has its CPUs already, or during a relocation its CPUs of before."""

    @property
    def placement(self) -> Placement:
        """The CPUs and memory that it is to have."""
        return self.bound.placement

    @property
    def revision(self) -> int:
        """The revision in effect."""
        return self.bound.revision

    @property
    def newest_revision(self) -> int:
        """The newest revision, also where it was given up."""
        return self.failed_revision or self.revision

    @property
    def settled(self) -> bool:
        """Whether its cpuset has the CPUs of this revision alone, without the CPUs of older revisions."""
        return self.confirmed >= self.revision

    @property
    def needs(self) -> CpuMask:
        """CPUs that it cannot do without."""
        return self.placement.owned | mask_of(self.placement.vcpus)

    @property
    def most_threads(self) -> int:
        """How many threads its QEMU may have; one with more is not measured.

        A user who controls the VM's pod decides names and number of its threads, and each thread costs.
        """
        return THREADS_BESIDE_VCPUS + 2 * len(self.placement.vcpus)

    @property
    def measures_memory(self) -> bool:
        """Whether the NUMA nodes of its memory matter."""
        return self.placement.numa_memory is NumaMemory.STRICT and bool(self.placement.memory_nodes)

    def cpus_of(self, name: ThreadName, io_threads: Mapping[int, int]) -> CpuMask:
        """Find the CPUs of a thread; none where it may run anywhere in the cpuset.

        `io_threads` are the positions of all I/O threads by number: the placement counts them from 0.
        """
        placement = self.placement
        if placement.policy in (Policy.NUMA, Policy.NONE):
            return self.cpuset or placement.cpus
        match name.role:
            case ThreadRole.VCPU:
                return placement.cpus_of_vcpu(name.number)
            case ThreadRole.IO_THREAD:
                return placement.cpus_of_io_thread(io_threads[name.number])
            case ThreadRole.EMULATOR | ThreadRole.VHOST | ThreadRole.MIGRATION:
                return placement.emulator_cpus


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The plan for one node; an empty one while nothing is known."""

    pool: CpuMask = NO_CPUS
    """The shared pool; never empty once something is known."""
    online: CpuMask = NO_CPUS
    containers: Mapping[ContainerId, Cpuset] = field(default_factory=lambda: MappingProxyType({}))
    """The wanted cpuset of each container, never one without CPUs; none on a node that is only observed.

    Memory nodes that it does not state are left as they are.
    """
    pods: Mapping[PodUid, PodPlan] = field(default_factory=lambda: MappingProxyType({}))
    """Pods with a placement that have containers here which run their claims."""
    refused: Mapping[PodUid, ClaimRefusal] = field(default_factory=lambda: MappingProxyType({}))
    """Pods with a claim that does not get its CPUs, and why; also ones with no such container yet."""
    is_complete: bool = False
    """Whether the objects of the node were known: only then a pod that is missing in it has ended."""

    def for_spec(self, container: NodeContainer, setting: Cpuset) -> Cpuset:
        """Return the setting as its runtime's spec needs it: nothing for a container that has all CPUs."""
        untouched = not container.spec.cpus and container.cpus in (NO_CPUS, self.online)
        has_all = untouched and setting == Cpuset(self.online) and self.pool == self.online
        return NO_CPUSET if has_all else setting
