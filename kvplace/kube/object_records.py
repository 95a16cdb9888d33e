"""Records of Kubernetes objects: small frozen values with only the fields that are read.

A full virt-launcher pod is 18 KB of JSON and a thousand Python objects; a record makes five thousand pods
cheap to cache. Annotations stay texts here; core reads their content and raises its own errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeAlias

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.free_resources import NOTHING_IN_USE, CpuUsage, MemoryInUse
from kvplace.core.ledger import Ledger
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import (
    NO_CPUS,
    ContainerId,
    CpuMask,
    NodeName,
    NumaId,
    PciAddress,
    PodUid,
    ResourceName,
)
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import TOPOLOGY_READY

OUR_PREFIX = "kvplace.io/"
"""How the types of our conditions begin on objects that others write conditions on, too."""
MAX_MESSAGE = 4096
"""Longer messages are cut."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, after the API conventions of Kubernetes; the good state is always True."""

    type: str
    status: bool | None
    """None is Unknown."""
    reason: str
    """In CamelCase, for machines."""
    message: str
    """One sentence for people."""
    changed: str = field(default="", compare=False)
    """When the stored status changed last, RFC 3339; empty if that is not known."""

    @classmethod
    def read(cls, kind: str, status: str, reason: str, message: str, changed: str = "") -> Condition:
        """Read a condition as the API spells it; a status that is neither True nor False is Unknown."""
        return cls(kind, {"True": True, "False": False}.get(status), reason, message, changed)

    def document(self, changed: datetime | None) -> dict[str, str]:
        """Write it as JSON; `changed` is when its status last did, None leaves the stored moment."""
        written = {
            "type": self.type,
            "status": "Unknown" if self.status is None else str(self.status),
            "reason": self.reason,
            "message": self.message[:MAX_MESSAGE],
        }
        return written if changed is None else {**written, "lastTransitionTime": write_time(changed)}


def write_time(moment: datetime) -> str:
    """Write a moment in UTC as the API does."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


_TERMINAL = ("Succeeded", "Failed")


def qemu_has_ended(phase: str, vmi: str, *, compute_terminated: bool) -> bool:
    """Whether the QEMU of a pod has ended by its status: guarantee 6 asks this, and no other rule.

    The pod is terminal, or the compute container of its VM has ended.

    A VM's containers are never restarted; containers of a plain pod may be, with any name.
    """
    return phase in _TERMINAL or bool(vmi and compute_terminated)


NO_NODE = NodeName("")
NO_CONTAINER = ContainerId("")
NO_SHAPE = b""


@dataclass(frozen=True, slots=True)
class PodRecord:
    """A pod that opted in; keyed by UID, so a pod created again under the same name is another one."""

    namespace: str
    name: str
    uid: PodUid
    node: NodeName = NO_NODE
    """Name of the node it is bound to; empty while unbound."""
    phase: str = "Pending"
    deleting: bool = False
    request: str = ""
    """Text of the annotation kvplace.io/request."""
    placement: str = ""
    """Text of the annotation kvplace.io/placement."""
    cpu_map: str = ""
    """Text of the annotation cpu-map."""
    vmi: str = ""
    """Name of the owning VirtualMachineInstance; empty for a plain pod."""
    vmi_uid: str = ""
    migration: str = ""
    """The live migration that the pod is the target of; empty for another pod."""
    compute_terminated: bool = False
    """Whether the container `compute`, the one with QEMU, has ended."""
    compute_container: ContainerId = NO_CONTAINER
    """The id of that container; empty until the kubelet has reported that it was created."""
    conditions: tuple[Condition, ...] = ()
    """kvplace's conditions in its status: types that begin with `kvplace.io/`."""
    asking: Mapping[str, str] = field(default_factory=dict)
    """The annotations of a plain pod that opted in; a VM has them on its VMI."""
    resource_version: str = ""
    shape: bytes = NO_SHAPE
    """Equal for unbound pods that kube-scheduler offers the same nodes; `NO_SHAPE` for one on its own."""
    priority: int = 0
    """kube-scheduler tries pods of higher priority first, and may evict pods of lower priority for them."""
    was_tried: bool = False
    """Whether kube-scheduler has tried to find it a node."""
    unschedulable: str = ""
    """The message of kube-scheduler why it has found no node for it yet."""
    nominated: NodeName = NO_NODE
    """The node that a user has nominated for it: `status.nominatedNodeName`."""
    labels: str = ""
    """Its labels as JSON, once it has a node; disruption budgets select by them."""
    resources: Mapping[str, int] = field(default_factory=dict)
    """Its requests as kube-scheduler counts them, in thousandths, by resource."""
    repels: bool = False
    """Whether it keeps certain other pods off its node."""
    resource_claims: tuple[str, ...] = ()
    """The names of its ResourceClaims; empty for one that is not made yet."""
    created: str = ""
    """When it was created, RFC 3339."""

    @property
    def vm(self) -> str:
        """The name of its VM; its own name for a plain pod."""
        return self.vmi or self.name

    @property
    def is_terminal(self) -> bool:
        """Whether all its containers have ended, and none of them starts again."""
        return self.phase in _TERMINAL

    @property
    def has_ended(self) -> bool:
        """Whether its QEMU has ended by its status."""
        return qemu_has_ended(self.phase, self.vmi, compute_terminated=self.compute_terminated)

    def condition(self, kind: str) -> Condition | None:
        """Return one of `conditions` by its type."""
        return next((condition for condition in self.conditions if condition.type == kind), None)


@dataclass(frozen=True, slots=True)
class AgentPod:
    """A pod of an agent."""

    uid: PodUid
    node: NodeName
    is_ready: bool


@dataclass(frozen=True, slots=True)
class VmiRecord:
    """A VirtualMachineInstance with annotations that were edited while it ran."""

    namespace: str
    name: str
    uid: str
    asking: Mapping[str, str] = field(default_factory=dict)
    """The annotations with its request."""
    resource_version: str = ""


@dataclass(frozen=True, slots=True)
class PodReport:
    """The report of a node's agent about one pod with a claim: an entry of NodeTopology's status.pods."""

    uid: PodUid
    namespace: str = ""
    pod: str = ""
    """Its name."""
    revision: int = 0
    """The revision of the placement that was read back last; 0: none yet."""
    pinned: bool = False
    """Whether every thread is where that revision states."""
    running: bool = False
    """Whether a container of the pod that uses its CPUs exists on the node."""
    failed_revision: int = 0
    """The newest revision that the agent could not carry out and has undone; 0: none."""
    restored_placement: str = ""
    """The placement that is in effect instead, as JSON; empty unless a revision failed."""
    cpus: CpuMask = NO_CPUS
    """The CPUs that the threads of its QEMU, or of a plain pod, may actually run on."""
    drift: str = ""
    """The difference from the placement, or the failure of a revision, in one sentence."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node of the cluster."""

    name: NodeName
    uid: str
    cpu_map: str = ""
    """Text of the annotation cpu-map, written by the agent or by hand."""
    resource_version: str = ""
    cpu_map_by_agent: bool = False
    """Whether the node's agent has written its cpu-map last."""
    status: str = ""
    """As kubectl prints it: `Ready`, `NotReady`, `Ready,SchedulingDisabled`; empty where it was not read."""


@dataclass(frozen=True, slots=True)
class TopologyRecord:
    """A NodeTopology: the machine behind a node, or why its document cannot be read."""

    node: NodeName
    topology: Topology | None
    problem: str = ""
    kubelet_cpus: CpuMask = NO_CPUS
    """CPUs that the kubelet's own static policy holds there."""
    resource_version: str = ""
    enforcement: Enforcement = Enforcement.NONE
    """How its agent keeps other containers off owned CPUs."""
    pods: Mapping[PodUid, PodReport] = field(default_factory=dict)
    """The agent's report about each pod with a claim."""
    generation: int = 0
    """Changes with the spec."""
    by_agent: bool = False
    """Whether the node's agent has written the spec last; otherwise it was written by hand."""
    conditions: tuple[Condition, ...] = ()
    """The agent's report about itself."""
    observed_generation: int | None = None
    """The generation that its agent has seen."""
    in_use: MemoryInUse = NOTHING_IN_USE
    """Memory that something else than VMs with claims uses, as its agent measures it."""
    devices: DeviceReport | None = None
    """None where its agent knows nothing of devices."""

    @property
    def belongs_to_agent(self) -> bool:
        """Whether an agent wrote it, or has reported in it: a person may have written the description."""
        return self.by_agent or self.observed_generation is not None

    @property
    def agent_fault(self) -> str:
        """The report of its agent about itself, as a sentence, where it is not ready; else empty."""
        for condition in self.conditions:
            if condition.type == TOPOLOGY_READY and condition.status is False:
                return f"its agent reports {condition.reason}: {condition.message}"
        return ""

    @property
    def is_unread(self) -> bool:
        """Whether its agent has not read the newest description yet."""
        return self.observed_generation is not None and self.observed_generation < self.generation

    def allows_same_placements(self, other: TopologyRecord) -> bool:
        """Return whether placing is the same with both: an agent writes more often than a machine changes."""
        return (
            self.topology is other.topology
            and self.problem == other.problem
            and self.kubelet_cpus == other.kubelet_cpus
            and self.enforcement is other.enforcement
            and self.in_use == other.in_use
            and self.devices == other.devices
        )


@dataclass(frozen=True, slots=True)
class ResourceTopologyRecord:
    """The NodeResourceTopology of a node; only its writer matters here."""

    node: NodeName
    resource_version: str
    by_agent: bool


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """A NodeLedger as it was at one resource version.

    When `problem` is not empty the stored content cannot be read and `ledger` is empty: place nothing there.
    """

    node: NodeName
    ledger: Ledger
    resource_version: str
    uid: str = ""
    problem: str = ""
    is_whole: bool = True
    """Whether `ledger` has all stored fields, so that writing it as a whole loses nothing of others."""


ResourceClaimName: TypeAlias = tuple[str, str]
"""Namespace and name."""
DeviceKey: TypeAlias = tuple[str, str, str]
"""Driver, pool and name of a device, as an allocation names it."""


CPU_DRIVER = "dra.cpu"
"""The driver with CPUs as devices: dra-driver-cpu."""


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """A device that a driver publishes."""

    name: str
    numa_node: NumaId | None = None
    """As the driver states it; None where it does not, or states -1."""
    address: PciAddress | None = None
    pcie_root: str = ""
    node: NodeName = NO_NODE
    """Its node, where the devices of one slice are on several."""
    is_shared: bool = False
    """Whether several resource claims may have it at a time."""


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """A ResourceSlice: some devices of one pool."""

    name: str
    driver: str
    pool: str
    generation: int = 0
    """Only the slices with the highest generation of a pool count."""
    node: NodeName = NO_NODE
    """Empty for devices that are not of one node."""
    devices: tuple[SliceDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """One request of a resource claim."""

    device_class: str
    count: int = 1
    cpus: int | None = None
    """CPUs of dra-driver-cpu for each device; None where the request states no number of them."""


@dataclass(frozen=True, slots=True)
class ResourceClaimRecord:
    """A ResourceClaim."""

    namespace: str
    name: str
    requests: tuple[DeviceRequest, ...] = ()
    """Requests for a number of devices of one class; others, such as lists of alternatives, are left out."""
    allocated: tuple[DeviceKey, ...] | None = None
    """None until kube-scheduler has allocated devices."""
    resource_version: str = ""
    status: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Its whole status if dra-driver-cpu has a device of it, since kvplace writes that; else empty."""


@dataclass(frozen=True, slots=True)
class DeviceClassRecord:
    """A DeviceClass."""

    name: str
    driver: str = ""
    """The driver of all its devices; empty where its selectors do not name one."""
    extended_resource: ResourceName | None = None
    """Resource of a container that requests such a device without a resource claim."""


MAX_PODS = 1024
"""Entries that the CRD allows; a node has a tenth of it."""


@dataclass(frozen=True, slots=True)
class TopologyStatus:
    """Everything that the agent observes; equal values need no write."""

    observed_generation: int = 0
    """Generation of the spec that the agent has seen."""
    enforcement: Enforcement = Enforcement.NONE
    kubelet_cpus: CpuMask = NO_CPUS
    """CPUs that the kubelet's static policy has allocated."""
    usage: CpuUsage | None = None
    """How many CPUs are used and free; for people, and up to some seconds old."""
    pods: tuple[PodReport, ...] = ()
    in_use: MemoryInUse = NOTHING_IN_USE
    devices: DeviceReport | None = None
    """None while nothing is known of the devices."""
    conditions: tuple[Condition, ...] = ()
    changed: Mapping[str, datetime] = field(default_factory=dict)
    """When the status of each condition last changed, by its type."""

    def document(self) -> dict[str, Any]:
        """Write it as JSON: every field, so that a merge patch replaces the stored value."""
        return {
            "observedGeneration": self.observed_generation,
            "enforcement": self.enforcement.value,
            "kubeletCpus": format_cpu_list(self.kubelet_cpus),
            "usage": None if self.usage is None else self.usage.document(),
            "inUse": self.in_use.document(),
            "devices": None if self.devices is None else self.devices.document(),
            "pods": [_pod_document(pod) for pod in self.pods[:MAX_PODS]],
            "conditions": [
                {
                    **condition.document(self.changed[condition.type]),
                    "observedGeneration": self.observed_generation,
                }
                for condition in self.conditions
            ],
        }


def transition_times(
    before: TopologyStatus | None, conditions: Iterable[Condition], now: datetime
) -> dict[str, datetime]:
    """Return when the status of each condition last changed, given the status written before."""
    old = {} if before is None else {found.type: found.status for found in before.conditions}
    changed = {} if before is None else before.changed
    return {
        found.type: changed[found.type] if found.type in old and old[found.type] == found.status else now
        for found in conditions
    }


def _pod_document(pod: PodReport) -> dict[str, Any]:
    document = {
        "uid": pod.uid,
        "namespace": pod.namespace,
        "pod": pod.pod,
        "running": pod.running,
        "pinned": pod.pinned,
        "cpus": format_cpu_list(pod.cpus),
        "drift": pod.drift[:1024],
    }
    # Revisions begin at 1; 0 means none and is left out.
    optional = {
        "revision": pod.revision,
        "failedRevision": pod.failed_revision,
        "restoredPlacement": pod.restored_placement,
    }
    return {**document, **{key: value for key, value in optional.items() if value}}
