"""The answer to a request on one machine: a placement, or a refusal with the shortfall in numbers.

`Placement` is the decision about one machine. `PodPlacement` binds it to one pod and one node: the
annotation `kvplace.io/placement`. It is written only in the Binding, and its pod UID lets every reader see
its own placement from one that was inherited, edited or left behind.

Readers ignore keys that they do not know, so that a release may add some. A hook that did not know guest
cells would pin a mirroring VM and leave its guest topology alone; it never meets one, since each release
adds its own sidecar to the VMs that it admits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from kvplace.core.cpu_map import cpu_map_of, read_cpu_map, write_cpu_map
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.errors import BadAnnotation
from kvplace.core.guest_cells import GuestCell, read_guest_cells, write_guest_cells
from kvplace.core.json_fields import Fields, options_document, read_options_document
from kvplace.core.quantity import write_page_counts
from kvplace.core.request import DeviceNuma, NumaMemory, OnFailure, PinningOptions, Policy, Request
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NodeName, NumaId, PackageId, PodUid
from kvplace.core.strict_json import Json, shown
from kvplace.core.well_known_names import CPU_MAP, CRANE_RESULT, EXPLANATION, PLACEMENT

if TYPE_CHECKING:
    from kvplace.core.topology import Topology  # costs the hook a fifth of its start


PLACEMENT_VERSION = 1
_MAX_TEXT = 256 * 1024
MAX_REVISION = 2**31 - 1
_MAX_SOCKET = 2**31 - 1
"""Firmware numbers sockets as it likes: 65537 occurs."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The CPUs and memory that one VM gets on one machine."""

    policy: Policy
    vcpus: tuple[CpuId, ...]
    """The CPU of each vCPU; empty for policy `numa`, where every vCPU may use all of `cpus`."""
    cpus: CpuMask
    owned: CpuMask = NO_CPUS
    """CPUs that no other VM may use while this one lives, idle siblings and emulator CPUs included."""
    emulator_cpus: CpuMask = NO_CPUS
    io_thread_cpus: tuple[CpuMask, ...] = ()
    """CPU set of each I/O thread; empty means as the emulator."""
    numa_nodes: tuple[NumaId, ...] = ()
    numa_memory: NumaMemory = NumaMemory.OFF
    memory: Mapping[NumaId, Bytes] = field(default_factory=dict)
    """Bytes by NUMA node, huge pages included."""
    huge_pages: Mapping[NumaId, Mapping[Bytes, int]] = field(default_factory=dict)
    """Pages by NUMA node, then by page size in bytes."""
    packages: tuple[PackageId, ...] = ()
    l3_groups: tuple[int, ...] = ()
    """Indexes into the topology's L3 groups."""
    guest_cells: tuple[GuestCell, ...] = ()
    """The NUMA cells that the guest sees; empty unless it asked for them."""

    @property
    def floats(self) -> bool:
        """Whether the VM runs unpinned: the hook then leaves its XML as it is."""
        return self.policy is Policy.NONE

    @property
    def cpus_in_order(self) -> tuple[CpuId, ...]:
        """The CPUs of the vCPUs in their order; all CPUs where no vCPU has one of its own."""
        return self.vcpus or tuple(cpus_of(self.cpus))

    def cpus_of_vcpu(self, vcpu: int) -> CpuMask:
        """Return the CPUs that one vCPU may use: its own, or all of the VM's when none was chosen for it.

        A vCPU that is plugged in later has no CPU of its own. The whole set keeps it on the VM's cores from
        its first instruction, since libvirt applies the pin of the definition when the thread starts.
        """
        return CpuMask(1 << self.vcpus[vcpu] if vcpu < len(self.vcpus) else self.cpus)

    def cpus_of_io_thread(self, order: int) -> CpuMask:
        """Return the CPUs of an I/O thread; `order` counts the VM's I/O threads by ascending id from 0.

        More threads than the placement names share its sets in turn. None where it names no CPUs.
        """
        choices = self.io_thread_cpus or (self.emulator_cpus,)
        return choices[order % len(choices)]

    @property
    def memory_mode(self) -> NumaMemory:
        """How memory is bound where it is not bound cell by cell.

        Linux takes each huge page from the node of the thread that touches it first, a thread of QEMU, not a
        vCPU. So one node may give all pages, also pages of other VMs. Interleaved, each node gives its share.
        """
        of_several_nodes = sum(any(pages.values()) for pages in self.huge_pages.values()) > 1
        if of_several_nodes and self.numa_memory is NumaMemory.PREFERRED and not self.guest_cells:
            return NumaMemory.INTERLEAVE
        return self.numa_memory

    @property
    def memory_nodes(self) -> tuple[NumaId, ...]:
        """The NUMA nodes that give the VM memory; all of its nodes where that is not known."""
        return tuple(node for node in self.numa_nodes if self.memory.get(node)) or self.numa_nodes


@dataclass(frozen=True, slots=True)
class PodPlacement:
    """A placement bound to a pod and a node.

    `pod_uid`, `node` and `topology` are empty when it was made from a bare `cpu-map` that another program
    wrote.
    """

    pod_uid: PodUid
    node: NodeName
    topology: str
    """The fingerprint of the topology that the CPUs were chosen on."""
    on_failure: OnFailure
    placement: Placement
    enforced: bool = False
    """Whether an agent keeps other containers off the owned CPUs; the VM must not start before it does."""
    revision: int = 1
    """1 at the bind, one more each time that the running pod gets other CPUs."""
    options: PinningOptions | None = None
    """The options that this revision answers; None: the options of the pod's request."""
    device_numa: DeviceNuma = DeviceNuma.PREFERRED
    """The reaction of the hook to a device that is not local."""

    @classmethod
    def floating(cls, *, pod_uid: PodUid, node: NodeName) -> PodPlacement:
        """State that a pod runs unpinned because nothing fitted and its user asked to `float` then."""
        return cls(pod_uid, node, "", OnFailure.FLOAT, Placement(Policy.NONE, (), NO_CPUS))

    @classmethod
    def of_cpu_map(cls, text: str, *, on_failure: OnFailure = OnFailure.WAIT) -> PodPlacement:
        """Read a bare `cpu-map`: vCPU *i* takes the *i*-th id, other threads all ids, memory floats."""
        sockets = read_cpu_map(text)
        vcpus = tuple(cpu for ids in sockets.values() for cpu in ids)
        cpus = mask_of(vcpus)
        placement = Placement(Policy.EXCLUSIVE, vcpus, cpus, emulator_cpus=cpus, packages=tuple(sockets))
        return cls(PodUid(""), NodeName(""), "", on_failure, placement)

    def document(self) -> Json:
        """Write the placement as a JSON object."""
        placement = self.placement
        document: Json = {
            "version": PLACEMENT_VERSION,
            "podUid": self.pod_uid,
            "node": self.node,
            "topology": self.topology,
            "policy": placement.policy.value,
            "onFailure": self.on_failure.value,
            "vcpus": list(placement.vcpus),
            "cpus": format_cpu_list(placement.cpus),
            "emulatorCpus": format_cpu_list(placement.emulator_cpus),
            "ioThreadCpus": [format_cpu_list(cpus) for cpus in placement.io_thread_cpus],
            "numaNodes": list(placement.numa_nodes),
            "numaMemory": placement.numa_memory.value,
            "memory": {str(node): count for node, count in placement.memory.items()},
            "owned": format_cpu_list(placement.owned),
            "hugePages": {
                str(node): write_page_counts(pages) for node, pages in placement.huge_pages.items()
            },
        }
        document |= write_guest_cells(placement.guest_cells)
        document["sockets"] = list(placement.packages)
        document["l3"] = list(placement.l3_groups)
        if self.enforced:
            document["enforced"] = True
        if self.revision != 1:
            document["revision"] = self.revision
        if self.device_numa is not DeviceNuma.PREFERRED:
            document["deviceNuma"] = self.device_numa.value
        if self.options is not None:
            document["options"] = options_document(self.options)
        return document

    def to_json(self) -> str:
        """Write the annotation's one line."""
        return json.dumps(self.document(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PodPlacement:
        """Read the annotation; raises BadAnnotation that names the fault."""
        return _placement_of(text)


@lru_cache(maxsize=1024)
def _placement_of(text: str) -> PodPlacement:
    """Read an annotation once: a component reads the same one several times in a row."""
    try:
        return _read(_fields(text))
    except ValueError as error:
        raise BadAnnotation(PLACEMENT, text, str(error)) from None


def _fields(text: str) -> Fields:
    if len(text) > _MAX_TEXT:
        raise ValueError(f"is longer than {_MAX_TEXT} characters")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(
            "is not valid JSON; only kvplace writes this annotation: delete it and recreate the pod"
        ) from None
    if not isinstance(raw, dict):
        raise ValueError("must be a JSON object")  # noqa: TRY004
    version = raw.get("version")
    if type(version) is not int or version != PLACEMENT_VERSION:
        raise ValueError(
            f"has version {shown(version)}; this program reads version {PLACEMENT_VERSION}, "
            "use matching releases"
        )
    return Fields(raw)


def _read(fields: Fields) -> PodPlacement:
    bound = PodPlacement(
        pod_uid=PodUid(fields.text("podUid")),
        node=NodeName(fields.text("node")),
        topology=fields.text("topology", ""),
        on_failure=fields.word("onFailure", OnFailure, OnFailure.WAIT),
        placement=Placement(
            policy=fields.word("policy", Policy),
            vcpus=tuple(map(CpuId, fields.ids("vcpus"))),
            cpus=fields.cpus("cpus"),
            owned=fields.cpus("owned", ""),
            emulator_cpus=fields.cpus("emulatorCpus", ""),
            io_thread_cpus=fields.cpu_lists("ioThreadCpus") if "ioThreadCpus" in fields.raw else (),
            numa_nodes=tuple(map(NumaId, fields.ids("numaNodes"))),
            numa_memory=fields.word("numaMemory", NumaMemory, NumaMemory.OFF),
            memory=fields.bytes_by_node("memory"),
            huge_pages=fields.pages_by_node("hugePages"),
            packages=tuple(map(PackageId, fields.ids("sockets", _MAX_SOCKET))),
            l3_groups=fields.ids("l3"),
            guest_cells=read_guest_cells(fields, vcpus=len(fields.ids("vcpus"))),
        ),
        enforced=fields.flag("enforced", default=False),
        revision=fields.whole("revision", MAX_REVISION, least=1, default=1),
        options=read_options_document(fields.fields("options")) if "options" in fields.raw else None,
        device_numa=fields.word("deviceNuma", DeviceNuma, DeviceNuma.PREFERRED),
    )
    _check(bound.placement)
    return bound


def _check(placement: Placement) -> None:
    if not placement.cpus and not placement.floats:
        raise ValueError("cpus is empty; a placement names at least one CPU")
    if len(set(placement.vcpus)) != len(placement.vcpus):
        raise ValueError("vcpus gives one CPU to two vCPUs")
    if outside := mask_of(placement.vcpus) & ~placement.cpus:
        raise ValueError(f"vcpus has CPU {format_cpu_list(outside)}, which is not in cpus")
    if not placement.vcpus and placement.policy not in (Policy.NUMA, Policy.NONE):
        raise ValueError(f"vcpus is empty, which policy {placement.policy.value} does not allow")
    if foreign := {cell.node for cell in placement.guest_cells} - set(placement.numa_nodes):
        raise ValueError(f"guestCells has NUMA node {min(foreign)}, which is not in numaNodes")


THE_MACHINE = "the machine"
"""Where something is missing when the scope is all of it."""


class Reason(Enum):
    """The first constraint that failed."""

    NO_SOCKET_FITS = "NoSocketFits"
    NO_NUMA_NODE_FITS = "NoNumaNodeFits"
    NO_L3_FITS = "NoL3Fits"
    NO_NODE_FITS = "NotEnoughCpus"
    NOT_ENOUGH_MEMORY = "NotEnoughMemory"
    NOT_ENOUGH_HUGE_PAGES = "NotEnoughHugePages"
    NOT_ENOUGH_DEVICES = "NotEnoughDevices"
    """Fewer devices are free than the VM requests; a live kube-scheduler refuses such nodes itself."""
    NO_LOCAL_DEVICES = "NoLocalDevices"
    NO_TOPOLOGY = "NoTopology"
    NODE_FILTERED = "NodeFiltered"
    """kube-scheduler rejects the node, with any free CPUs: a cordon, a taint, a label that the node lacks."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer "does not fit": a sentence for people, the numbers for programs."""

    reason: Reason
    message: str
    shortfall: Mapping[str, int | str]
    never: bool
    """Whether it would not fit either if the machine were empty."""
    missing: int = field(init=False, repr=False, compare=False)
    """How much is missing, in the unit of the reason; 0 where that is not known."""
    group: tuple[str, bool, str] = field(init=False, repr=False, compare=False)
    """Equal for refusals for one reason, with any numbers."""

    def __post_init__(self) -> None:
        missing = self.shortfall.get("missing", 0)
        object.__setattr__(self, "missing", missing if isinstance(missing, int) else 0)
        message = "" if "where" in self.shortfall else self.message
        # The name of a reason is hashed in a tenth of the time that the reason takes.
        object.__setattr__(self, "group", (self.reason._name_, self.never, message))


def placement_document(
    machine: str, topology: Topology, request: Request, placement: Placement, *, uid: str = ""
) -> Json:
    """Write a placement: the annotation `kvplace.io/placement` of a pod of that UID, and where it lies."""
    bound = PodPlacement(
        PodUid(uid),
        NodeName(machine),
        topology.fingerprint,
        request.options.on_failure,
        placement,
        device_numa=request.options.device_numa,
    )
    document = bound.document()
    document["cpuMap"] = cpu_map_of(topology, placement.cpus_in_order)
    return document


def result_annotations(
    topology: Topology, bound: PodPlacement, *, crane_result: bool = False, explanation: str = ""
) -> dict[str, str]:
    """Write a placement as annotations of its pod; `crane_result` adds the annotation of Crane."""
    placement = bound.placement
    annotations = {
        PLACEMENT: bound.to_json(),
        CPU_MAP: write_cpu_map(topology, placement.cpus_in_order),
    }
    if crane_result:
        annotations[CRANE_RESULT] = _crane_result(topology, placement)
    if explanation:
        annotations[EXPLANATION] = explanation
    return annotations


def floating_annotations(*, pod_uid: PodUid, node: NodeName) -> dict[str, str]:
    """Write as annotations that a pod runs unpinned."""
    return {PLACEMENT: PodPlacement.floating(pod_uid=pod_uid, node=node).to_json()}


def _crane_result(topology: Topology, placement: Placement) -> str:
    """Write the CPUs by NUMA node as Crane's `topology-result` (gocrane/api topology v1alpha1 ZoneList)."""
    return json.dumps(
        [
            {
                "name": f"node{node}",
                "type": "Node",
                "resources": {
                    "capacity": {"cpu": str((topology.node_by_id[node].cpus & placement.cpus).bit_count())}
                },
            }
            for node in placement.numa_nodes
        ],
        separators=(",", ":"),
    )
