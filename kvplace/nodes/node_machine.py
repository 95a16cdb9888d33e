"""The machine of a node, as its NodeTopology and its `cpu-map` annotation describe it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.node_choice import Fit
from kvplace.core.cpu_map import read_node_cpu_map
from kvplace.core.device_locality import predicted_held
from kvplace.core.errors import BadAnnotation, BadTopology
from kvplace.core.free_resources import NOTHING_IN_USE, Free, free_of
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.node_devices import DeviceReport, HeldDevices, NodeDevices
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import Request
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NO_CPUS, CpuMask, NumaId, PackageId, PodUid, ResourceName
from kvplace.core.topology import Topology, topology_of_cpu_map
from kvplace.kube.object_records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord


def answer_of(node: NodeSnapshot, request: Request) -> Fit | Refusal:
    """Return the placement of a VM on a node in this state, or the refusal."""
    machine = node.machine
    answer = place(machine.topology, node.free, request)
    return answer if isinstance(answer, Refusal) else Fit.of(machine.topology, node.free, request, answer)


@dataclass(frozen=True, slots=True)
class NodeMachine:
    """The machine of a node, and what runs there besides VMs."""

    topology: Topology
    pools_shrink: bool = False
    """Whether an agent can take CPUs out of the pools of `numa` VMs."""
    others: Claim | None = None
    """The memory that something else than VMs with claims uses."""
    devices: DeviceReport | None = None
    """None where nothing is known of its devices."""

    @property
    def key(self) -> tuple[str, CpuMask]:
        """Equal for machines that give out the same CPUs."""
        return (self.topology.fingerprint, self.topology.allocatable)

    def free(self, ledger: Ledger, holds: Iterable[Claim] = (), devices: NodeDevices | None = None) -> Free:
        """Return the free resources after a ledger's claims, the tentative `holds` and the use by others."""
        taken = holds if self.others is None else (*holds, self.others)
        return free_of(self.topology, ledger, taken, pools_shrink=self.pools_shrink, devices=devices)

    def can_give(self, claim: Claim, ledger: Ledger, holds: Iterable[Claim] = ()) -> bool:
        """Whether a claim fits beside a ledger's claims, the tentative `holds` and the use by others."""
        return self.free(ledger, holds).can_give(claim)


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node at one moment: its machine and its free resources."""

    machine: NodeMachine
    free: Free
    """Its devices without devices of bound pods."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for nodes that answer every request alike."""
        return (*self.machine.key, self.free)


@dataclass(frozen=True, slots=True)
class Unusable:
    """Nothing can be placed on a node."""

    problem: str
    """The reason in one clause, without the node's name."""


NOT_DESCRIBED = Unusable("neither a NodeTopology object nor a cpu-map annotation describes the node")
NOT_KNOWN = Unusable("the node is not known to the API server")


def machine_of_node(node: NodeRecord | None, described: TopologyRecord | None) -> NodeMachine | Unusable:
    """Combine the descriptions of a node.

    Its cpu-map and the CPUs that the kubelet's static policy holds limit the CPUs that may be given out. A
    node without a NodeTopology is described by its cpu-map alone.
    """
    if node is None:
        return NOT_KNOWN
    try:
        sockets = read_node_cpu_map(node.cpu_map) if node.cpu_map else None
    except BadAnnotation as error:
        return Unusable(f"its {error}")
    if described is None:
        return NOT_DESCRIBED if sockets is None else _of_cpu_map(sockets)
    topology = described.topology
    if topology is None:
        return Unusable(f"its NodeTopology cannot be read: {described.problem}")
    given = topology.allocatable & ~described.kubelet_cpus
    if sockets is not None:
        given &= _union(sockets)
    topology = topology.giving_out(CpuMask(given))
    others = described.in_use.claim() if described.in_use != NOTHING_IN_USE else None
    return NodeMachine(topology, described.enforcement is not Enforcement.NONE, others, described.devices)


def with_ledger(machine: NodeMachine | Unusable, record: LedgerRecord | None) -> NodeMachine | Unusable:
    """Return a machine unless its ledger cannot be read; None stands for a ledger that does not exist yet."""
    if record is not None and record.problem and not isinstance(machine, Unusable):
        return Unusable(f"its ledger cannot be read: {record.problem}")
    return machine


def snapshot_of(
    machine: NodeMachine | Unusable,
    record: LedgerRecord | None,
    holds: Iterable[Claim] = (),
    *,
    request_of: Callable[[PodUid], Request | None] = lambda _: None,
) -> NodeSnapshot | Unusable:
    """Combine a node's machine with its ledger, None when it has none yet, and the tentative `holds`.

    `request_of` returns the request of a pod with a claim or hold: its devices count as taken until the agent
    has reported them.
    """
    machine = with_ledger(machine, record)
    if isinstance(machine, Unusable):
        return machine
    ledger, holds = Ledger() if record is None else record.ledger, tuple(holds)
    devices = devices_after(machine.devices, ledger, holds, request_of)
    return NodeSnapshot(machine, machine.free(ledger, holds, devices))


def request_of(pod: PodRecord | None) -> Request | None:
    """Return the request of a pod that has or gets devices; None if it has ended or requests nothing."""
    if pod is None or pod.has_ended or not pod.request:
        return None
    try:
        return read_pod_request(pod.request).request
    except BadAnnotation:
        return None


def with_claimed_devices(request: Request, placement: Placement) -> Request:
    """Return the request of a running VM with devices of resource claims, as beside its present cores."""
    return replace(request, device_nodes=request.device_nodes | frozenset(placement.numa_nodes))


def devices_after(
    report: DeviceReport | None,
    ledger: Ledger,
    holds: Iterable[Claim],
    request_of: Callable[[PodUid], Request | None],
) -> NodeDevices | None:
    """Count devices of pods that are not reported as taken."""
    if report is None:
        return None
    devices = report.devices
    for held in _unreported(report, ledger, holds, request_of).values():
        devices = devices.without(held)
    return devices


def devices_held(
    report: DeviceReport | None,
    ledger: Ledger,
    holds: Iterable[Claim],
    request_of: Callable[[PodUid], Request | None],
) -> Mapping[PodUid, HeldDevices]:
    """Return the devices of each pod: the reported ones, and the predicted ones."""
    found: dict[PodUid, Counter[tuple[ResourceName, NumaId]]] = {}
    for uid, given in {} if report is None else report.pods.items():
        found[uid] = Counter((device.resource, device.node) for device in given)
    for uid, held in _unreported(report, ledger, holds, request_of).items():
        found.setdefault(uid, Counter()).update(held)
    return found


def _unreported(
    report: DeviceReport | None,
    ledger: Ledger,
    holds: Iterable[Claim],
    request_of: Callable[[PodUid], Request | None],
) -> dict[PodUid, HeldDevices]:
    """Predict the devices of pods that are not reported, in the order of the claims and then of the holds.

    The kubelet gives a pod its devices one resource after the other, so a report may have some of them.
    """
    found: dict[PodUid, HeldDevices] = {}
    if report is None or not report.devices.counts:
        return found
    devices = report.devices
    stored = [claim for claim in ledger.claims.values() if claim.reserved is None]
    claims = [*sorted(stored, key=lambda claim: (claim.since, claim.uid)), *holds]
    for uid in dict.fromkeys(claim.uid for claim in claims):
        request = request_of(uid)
        if request is not None and request.devices:
            given = Counter(device.resource for device in report.pods.get(uid, ()))
            missing = {name: count - given[name] for name, count in request.devices.items()}
            found[uid] = predicted_held(devices, missing)
            devices = devices.without(found[uid])
    return found


def _of_cpu_map(sockets: dict[PackageId, CpuMask]) -> NodeMachine | Unusable:
    try:
        topology = topology_of_cpu_map(sockets)
    except BadTopology as error:
        return Unusable(f"its cpu-map does not describe a machine: {error}")
    return NodeMachine(topology)


def _union(sockets: dict[PackageId, CpuMask]) -> CpuMask:
    cpus = NO_CPUS
    for of_socket in sockets.values():
        cpus |= of_socket
    return cpus
