"""The view of a cluster for people: every node with its CPUs and claims, every VM with its place and state.

A view holds values of one moment, from lists that were read once (`cluster_reading`) or from watches. A VM
here is a pod that opted in. So a plain pod counts as a VM, and during a live migration two VMs have one name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvplace.core.device_locality import LocatedDevice, located
from kvplace.core.errors import BadAnnotation
from kvplace.core.free_resources import FreeBlocks, free_blocks_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange
from kvplace.core.node_devices import NodeDevices, PodDevice
from kvplace.core.placement import PodPlacement
from kvplace.core.request import DeviceNuma, PinningOptions, Request
from kvplace.core.request_json import PodRequest, read_pod_request
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
from kvplace.core.well_known_names import MOVABLE, PINNED
from kvplace.kube.object_records import (
    NO_NODE,
    Condition,
    LedgerRecord,
    NodeRecord,
    PodRecord,
    PodReport,
    TopologyRecord,
)
from kvplace.nodes.node_cache import FreeBlockTotals, NodeCache
from kvplace.nodes.node_machine import (
    NodeMachine,
    NodeSnapshot,
    Unusable,
    machine_of_node,
    request_of,
    snapshot_of,
)

if TYPE_CHECKING:
    from kvplace.kube.reported_vms import ReportedVm  # loads the HTTP client


@dataclass(frozen=True)
class NodeView:
    """One node: its machine, its ledger, and counts of both."""

    name: NodeName
    machine: NodeMachine | Unusable
    """The machine, or the reason against any placement on the node."""
    described: TopologyRecord | None = None
    ledger_record: LedgerRecord | None = None
    exists: bool = True
    """Whether the API server has the node; of one that is gone, ledger or NodeTopology may be left."""
    status: str = ""
    """The status as kubectl prints it; empty if it was not read."""
    pods: Mapping[PodUid, PodRecord] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """Pods by UID, with the pods of the node: devices that its agent has not reported yet count as taken;
    empty where the pods were not read."""

    @property
    def ledger(self) -> Ledger:
        """Its claims; an empty ledger where there is none."""
        return Ledger() if self.ledger_record is None else self.ledger_record.ledger

    @cached_property
    def snapshot(self) -> NodeSnapshot | Unusable:
        """Its machine and free resources, as in scheduling."""
        return snapshot_of(
            self.machine, self.ledger_record, request_of=lambda uid: request_of(self.pods.get(uid))
        )

    def without(self, pod: PodUid) -> NodeView:
        """The node as if a pod held nothing there."""
        record = self.ledger_record
        if record is None or pod not in record.ledger.claims:
            return self
        ledger = record.ledger.after(LedgerChange(releases=(pod,)))
        return replace(self, ledger_record=replace(record, ledger=ledger))

    @property
    def problem(self) -> str:
        """The reason, in one clause, why nothing can be placed there; empty if something can."""
        return self.snapshot.problem if isinstance(self.snapshot, Unusable) else ""

    @property
    def devices(self) -> NodeDevices | None:
        """Its devices; devices of pods with a claim are taken. None where its agent reports none."""
        if not isinstance(self.snapshot, Unusable):
            return self.snapshot.free.devices
        report = None if self.described is None else self.described.devices
        return None if report is None else report.devices

    @property
    def reports(self) -> Mapping[PodUid, PodReport]:
        """Its agent's measurements, by pod."""
        return {} if self.described is None else self.described.pods

    @cached_property
    def free_blocks(self) -> FreeBlocks | None:
        """Its free CPUs and its largest free blocks; None where nothing can be placed."""
        if isinstance(self.snapshot, Unusable):
            return None
        machine = self.snapshot.machine
        return free_blocks_of(machine.topology, self.snapshot.free.cpus)

    @property
    def enforces(self) -> bool:
        """Whether its agent sets cpusets, so that a running VM can get other cores."""
        return self.described is not None and self.described.enforcement.by_agent

    @property
    def cpus(self) -> CpuMask:
        """All CPUs of the machine."""
        return NO_CPUS if isinstance(self.machine, Unusable) else self.machine.topology.cpus

    @property
    def reserved(self) -> CpuMask:
        """CPUs that are never given out: reserved, held by the kubelet, or not in the node's cpu-map."""
        return (
            NO_CPUS if isinstance(self.machine, Unusable) else self.cpus & ~self.machine.topology.allocatable
        )

    @property
    def owned(self) -> CpuMask:
        """CPUs that one VM has for itself."""
        return self.ledger.owned

    @property
    def shared(self) -> CpuMask:
        """CPUs without an owner that VMs share."""
        return self.ledger.shared

    @property
    def free(self) -> CpuMask:
        """CPUs that an exclusive VM could get."""
        return NO_CPUS if isinstance(self.snapshot, Unusable) else self.snapshot.free.cpus


class VmState(Enum):
    """The progress of a VM; the values are for people."""

    NOT_CREATED = "NotCreated"
    """It has no pod: it is stopped, or KubeVirt cannot make its pod yet."""
    WAITING = "Waiting"
    """It has no node yet."""
    BOUND = "Bound"
    """Node and cores are chosen; it does not run yet."""
    STARTING = "Starting"
    """Its pod runs; KubeVirt has not started its guest yet."""
    RUNNING = "Running"
    """It runs; the agent has not measured its threads yet, or there is none."""
    PINNED = "Pinned"
    """Every thread has been read back on the cores of the newest placement."""
    NOT_PINNED = "NotPinned"
    """It runs, and the agent reports that threads are not where they should be."""
    FLOATING = "Floating"
    """It runs without cores of its own: nothing fitted and its user asked to `float` then, or for `none`."""
    ENDING = "Ending"
    """It is being deleted, or its QEMU has ended and the other containers of its pod have not."""
    ENDED = "Ended"
    FAILED = "Failed"


@dataclass(frozen=True)
class VmView:
    """One pod that opted in: its request, its placement and the measurement of the agent.

    In a list for people (`cluster_reading`) a VM without a pod is one, too: its pod then has no name.
    """

    pod: PodRecord
    claim: Claim | None = None
    """Its claim in the node's ledger; None if it has none, or the ledger was not read."""
    kubevirt: ReportedVm | None = None
    """The report of KubeVirt; None for a plain pod, and if it was not read."""
    devices: tuple[LocatedDevice, ...] | None = None
    """Its devices from the kubelet; None if the agent has not reported them, or they were not read."""
    reserved_on: NodeName = NO_NODE
    """Of a VM that waits: the node where other VMs make room for it; its claim there has the CPUs."""

    @property
    def namespace(self) -> str:
        return self.pod.namespace

    @property
    def name(self) -> str:
        """The name of its VMI, or of the plain pod."""
        return self.pod.vm

    @property
    def is_vmi(self) -> bool:
        """Whether it is a VM of KubeVirt; otherwise a plain pod."""
        return bool(self.pod.vmi)

    @property
    def node(self) -> NodeName:
        """Empty while it waits."""
        return self.pod.node

    @cached_property
    def request(self) -> PodRequest | None:
        """Its request; None when kvplace could not have written that."""
        try:
            return read_pod_request(self.pod.request)
        except BadAnnotation:
            return None

    @cached_property
    def placement(self) -> PodPlacement | None:
        """The cores that it was given last; None before that, and when kvplace could not have written it."""
        try:
            placement = PodPlacement.from_json(self.pod.placement) if self.pod.placement else None
        except BadAnnotation:
            return None
        return placement if placement is None or placement.pod_uid == self.pod.uid else None

    @property
    def request_in_effect(self) -> Request | None:
        """Its request with the options of its placement, if these are known; None if it cannot be read."""
        if self.request is None:
            return None
        placed = None if self.placement is None else self.placement.options
        return replace(self.request.request, options=placed or self.request.request.options)

    @property
    def has_pod(self) -> bool:
        """Whether there is a pod for it."""
        return bool(self.pod.name)

    @property
    def is_over(self) -> bool:
        """Whether its pod has ended, or its QEMU: the rest of the pod needs no cores."""
        return self.pod.has_ended

    @property
    def is_held(self) -> bool:
        """Whether its QEMU has ended and another container keeps its pod running, for seconds as a rule."""
        return self.pod.has_ended and not self.pod.is_terminal

    @property
    def phase(self) -> str:
        """Its phase in KubeVirt; empty if it is not known."""
        return "" if self.kubevirt is None else self.kubevirt.status

    @property
    def options(self) -> PinningOptions | None:
        """Its request for cores."""
        if self.request is not None:
            return self.request.request.options
        return None if self.kubevirt is None else self.kubevirt.options

    @property
    def pinned(self) -> Condition | None:
        """The agent's report about its threads."""
        return self.pod.condition(PINNED)

    @property
    def state(self) -> VmState:
        """Its progress."""
        if not self.has_pod:
            return VmState.NOT_CREATED
        if self.pod.phase in _OVER:
            return _OVER[self.pod.phase]
        if self.pod.deleting or self.is_held:
            return VmState.ENDING
        if not self.node:
            return VmState.WAITING
        if self.pod.phase != "Running":
            return VmState.BOUND
        measured = self.pinned is not None and self.pinned.status is not None
        if self.phase in _BEFORE_THE_GUEST and not measured:
            return VmState.STARTING
        if self.placement is not None and self.placement.placement.floats:
            return VmState.FLOATING
        if self.pinned is None or self.pinned.status is None:
            return VmState.RUNNING
        return VmState.PINNED if self.pinned.status else VmState.NOT_PINNED


_BEFORE_THE_GUEST = ("Pending", "Scheduling", "Scheduled")
"""Phases of a VirtualMachineInstance before its guest runs."""
_OVER = {"Succeeded": VmState.ENDED, "Failed": VmState.FAILED}


@dataclass(frozen=True)
class ClusterView:
    """Nodes by name and VMs by pod UID, both in the order of their names."""

    nodes: Mapping[NodeName, NodeView]
    vms: Mapping[PodUid, VmView]

    @cached_property
    def totals(self) -> FreeBlockTotals:
        """The free CPUs of all nodes together."""
        return FreeBlockTotals(
            node.free_blocks for node in self.nodes.values() if node.free_blocks is not None
        )

    @cached_property
    def by_node(self) -> Mapping[NodeName, tuple[VmView, ...]]:
        """The VMs on each node that has some."""
        found: dict[NodeName, list[VmView]] = {}
        for vm in self.vms.values():
            if vm.node:
                found.setdefault(vm.node, []).append(vm)
        return {node: tuple(vms) for node, vms in found.items()}

    @cached_property
    def names_of_claims(self) -> Mapping[PodUid, str]:
        """The name of the VM of every claim, `namespace/name`: each claim has another name.

        Two pods of one VM are named by their pods, and two pods of one name also by their UIDs.
        """
        claims = [claim for node in self.nodes.values() for claim in node.ledger.claims.values()]
        vms = Counter(claim.vm_name for claim in claims)
        pods = Counter((claim.namespace, claim.pod) for claim in claims)

        def name(claim: Claim) -> str:
            if vms[claim.vm_name] == 1:
                return claim.vm_name
            pod = f"{claim.namespace}/{claim.pod}"
            return pod if pods[claim.namespace, claim.pod] == 1 else f"{pod} ({claim.uid})"

        return {claim.uid: name(claim) for claim in claims}

    @property
    def agreed(self) -> frozenset[str]:
        """The VMs with claims and with the agreement of their owners to moves, as of their start."""
        return frozenset(
            name
            for uid, name in self.names_of_claims.items()
            if (vm := self.vms.get(uid)) is not None and vm.request is not None and vm.request.movable
        )

    def named(self, namespace: str, name: str) -> tuple[VmView, ...]:
        """Return the VMs with a VMI or pod of this name."""
        return tuple(
            vm for vm in self.vms.values() if vm.namespace == namespace and name in (vm.pod.vmi, vm.pod.name)
        )


def node_view(
    name: NodeName,
    node: NodeRecord | None,
    described: TopologyRecord | None,
    ledger: LedgerRecord | None,
    pods: Mapping[PodUid, PodRecord] = MappingProxyType({}),
) -> NodeView:
    """Combine the objects of a node."""
    status = "" if node is None else node.status
    return NodeView(name, machine_of_node(node, described), described, ledger, node is not None, status, pods)


def view_of(cache: NodeCache, name: NodeName) -> NodeView:
    """Return the view of a node as the watches report it."""
    topology, ledger = cache.topologies.get(name), cache.ledgers.current(name)
    return NodeView(name, cache.machine(name), topology, ledger, pods=cache.pods.records)


def cluster_view(
    nodes: Iterable[NodeRecord],
    topologies: Iterable[TopologyRecord],
    ledgers: Iterable[LedgerRecord],
    pods: Iterable[PodRecord],
) -> ClusterView:
    """Combine lists; a node that is in one of them only is in the view, too."""
    known = {node.name: node for node in nodes}
    described = {topology.node: topology for topology in topologies}
    written = {ledger.node: ledger for ledger in ledgers}
    names = sorted({*known, *described, *written})
    by_uid = {pod.uid: pod for pod in pods}
    views = {
        name: node_view(name, known.get(name), described.get(name), written.get(name), by_uid)
        for name in names
    }
    return ClusterView(views, vm_views(by_uid.values(), views))


def with_devices(vm: VmView, node: NodeView) -> VmView:
    """Add the devices that the agent of its node reports of a VM."""
    report = None if node.described is None else node.described.devices
    devices = None if report is None else report.pods.get(vm.pod.uid)
    if node.described is None or devices is None:
        return vm
    placed = None if vm.placement is None else vm.placement.placement
    mode = DeviceNuma.PREFERRED if vm.options is None else vm.options.device_numa
    return replace(vm, devices=located(devices, placed, node.described.topology, mode))


def with_devices_of_claims(vm: VmView, node: NodeView, devices: Iterable[PodDevice]) -> VmView:
    """Add the devices of the resource claims of a VM."""
    placed = None if vm.placement is None else vm.placement.placement
    topology = None if node.described is None else node.described.topology
    mode = DeviceNuma.PREFERRED if vm.options is None else vm.options.device_numa
    found = located(devices, placed, topology, mode)
    return replace(vm, devices=(*(vm.devices or ()), *found)) if found else vm


def vm_views(pods: Iterable[PodRecord], nodes: Mapping[NodeName, NodeView]) -> dict[PodUid, VmView]:
    """Return the VMs of pods, with the claims that these nodes have for them."""
    reserved = {
        uid: (node.name, claim)
        for node in nodes.values()
        for uid, claim in node.ledger.claims.items()
        if claim.reserved is not None
    }
    views = []
    for pod in pods:
        node = nodes.get(pod.node)
        if not pod.node and pod.uid in reserved:
            reserved_on, claim = reserved[pod.uid]
            views.append(VmView(pod, claim, reserved_on=reserved_on))
        elif node is None:
            views.append(VmView(pod))
        else:
            views.append(with_devices(VmView(pod, node.ledger.claims.get(pod.uid)), node))
    views.sort(key=lambda vm: (vm.namespace, vm.name, vm.pod.name, vm.pod.uid))
    return {vm.pod.uid: vm for vm in views}


def agreement_needed(names: Iterable[str]) -> str:
    """Name in one clause the VMs that need the annotation for a move; empty if all have it."""
    needed = sorted(set(names))
    if not needed:
        return ""
    return f'for that {_listed(needed)} {"needs" if len(needed) == 1 else "need"} {MOVABLE}: "true"'


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
