"""The explanation of one VM: what it asks for, how far it has come, and why it is where it is, or nowhere."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from kvplace.core.cpuset import mask_of
from kvplace.core.neighbours import Neighbour, neighbours_of
from kvplace.core.occupant import Occupant, occupant_of_claim
from kvplace.core.request_document import PodRequest
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
from kvplace.explain.fitting import AskedNode, Fitting
from kvplace.kube.node_filters import NodeObject, PodDemands, obstacle
from kvplace.kube.records import PodReport
from kvplace.nodes.agreement import agrees
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmView
from kvplace.nodes.node_machine import NodeMachine, Unusable

_RUNS_THERE = "the VM runs there, and a live migration goes to another node"


@dataclass(frozen=True, slots=True)
class Event:
    """An event about the VM."""

    when: str
    """RFC 3339, the last time."""
    about: str
    """`kind/name`."""
    reason: str
    note: str
    count: int = 1


@dataclass(frozen=True)
class Seat:
    """A pod of the VM that has its node."""

    vm: VmView
    node: NodeView
    neighbours: tuple[Neighbour, ...] = ()
    measured_since: str = ""
    """Since when the agent reports the same about its threads, RFC 3339; empty when it reports nothing."""
    is_ready: bool = True
    """Whether the node's kubelet reports; if not, what is reported about the VM is old."""

    @property
    def report(self) -> PodReport | None:
        """The agent's measurement; None without an agent, or before its first check."""
        return self.node.reports.get(self.vm.pod.uid)

    @property
    def unclaimed(self) -> CpuMask:
        """Its own CPUs by its placement that have no owner or another one in the node's ledger.

        None of a VM that has ended: its claim is released by then.
        """
        if self.vm.placement is None or self.vm.is_over:
            return NO_CPUS
        owners, uid = self.node.ledger.owners, self.vm.pod.uid
        held = mask_of(cpu for cpu, owner in owners.items() if owner == uid)
        return CpuMask(self.vm.placement.placement.owned & ~held)

    @property
    def is_relocating(self) -> bool:
        """Whether it is getting other cores at the moment."""
        return self.vm.claim is not None and self.vm.claim.relocation is not None


@dataclass(frozen=True)
class Explanation:
    """The answer to `explain`."""

    kind: str
    namespace: str
    name: str
    state: str
    request: PodRequest | None
    """None for what asks for no cores."""
    notes: tuple[str, ...] = ()
    """Sentences that state what else matters, the most important first."""
    fitting: Fitting | None = None
    """The answers of all nodes, for a VM that has none yet."""
    seats: tuple[Seat, ...] = ()
    """More than one during a live migration."""
    events: tuple[Event, ...] = ()
    """The newest last."""

    @property
    def fits_nowhere(self) -> bool:
        """Whether it waits and no node can hold it."""
        return self.fitting is not None and not self.fitting.candidates


def asked_nodes(
    view: ClusterView,
    nodes: Mapping[NodeName, NodeObject],
    demands: PodDemands,
    leaving: Container[NodeName] = (),
    pod: PodUid | None = None,
) -> Iterable[AskedNode]:
    """Combine what kvplace and kube-scheduler know of every node of the cluster.

    `leaving` are the present nodes of a VM that is to migrate. What is claimed or reserved for
    its `pod` already does not keep it away.
    """
    for name, stored in view.nodes.items():
        node = stored if pod is None else stored.without(pod)
        scheduled = nodes.get(name)
        if scheduled is not None:  # of a deleted node its ledger may be left
            hindered = _RUNS_THERE if name in leaving else obstacle(scheduled, demands)
            yield AskedNode(name, node.snapshot, hindered, occupants_of(view, node), may_move(view, node))


def occupants_of(view: ClusterView, node: NodeView) -> tuple[Occupant, ...]:
    """Return the VMs that a search for moves may move; none where one of them is not known well enough."""
    if any(claim.relocation is not None for claim in node.ledger.claims.values()):
        return ()
    found = []
    for uid in node.ledger.claims:
        vm = view.vms.get(uid)
        request = vm.request if vm is not None else None
        placement = vm.placement if vm is not None else None
        if vm is None or request is None or placement is None:
            return ()
        found.append(Occupant(f"{vm.namespace}/{vm.name}", request.request, placement.placement))
    machine = node.machine
    if isinstance(machine, NodeMachine) and (others := machine.others) is not None:
        found.append(occupant_of_claim(others.pod, others, machine.topology))
    names = {occupant.id for occupant in found}
    return tuple(found) if len(names) == len(found) else ()


def may_move(view: ClusterView, node: NodeView) -> frozenset[str]:
    """Name the VMs of a node that had opted in to moves when their pods were made."""
    found = (view.vms.get(uid) for uid in node.ledger.claims)
    return frozenset(f"{vm.namespace}/{vm.name}" for vm in found if vm is not None and agrees(vm))


def seat_of(vm: VmView, node: NodeView, measured_since: str = "", *, is_ready: bool = True) -> Seat:
    """Check a bound VM among its neighbours."""
    placement = vm.placement
    if placement is None or isinstance(node.machine, Unusable):
        return Seat(vm, node, (), measured_since, is_ready)
    cpus = CpuMask(placement.placement.cpus | placement.placement.owned)
    beside = neighbours_of(vm.pod.uid, cpus, node.machine.topology, node.ledger)
    return Seat(vm, node, beside, measured_since, is_ready)
