"""The nodes of a live cluster as plans start from them: the same values as those of a cluster document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.ledger import Claim
from kvplace.core.occupant import Occupant, occupant_of_claim
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmView
from kvplace.nodes.node_machine import NodeMachine, Unusable


def planning_nodes(view: ClusterView) -> tuple[ClusterNode, ...]:
    """Return every node where something can be placed, with the VMs that its ledger names.

    A VM is called `namespace/name`. A VM with an unknown placement, or one that is getting other cores, holds
    what its claim states and stays there.
    """
    narrowed: dict[tuple[str, CpuMask], Topology] = {}
    names = names_of_claims(view)
    found = []
    for name, node in view.nodes.items():
        if isinstance(node.snapshot, Unusable):
            continue
        machine = node.snapshot.machine
        key = (machine.topology.fingerprint, machine.allocatable)
        topology = narrowed.setdefault(key, _given_out(machine))
        running = tuple(
            _occupant(names[claim.uid], view, node, claim) for claim in node.ledger.claims.values()
        )
        if (others := machine.others) is not None:
            running += (occupant_of_claim(f"{others.pod} of {name}", others, topology),)
        found.append(ClusterNode(NodeName(name), topology, running, pools_shrink=machine.pools_shrink))
    return tuple(found)


def names_of_claims(view: ClusterView) -> Mapping[PodUid, str]:
    """Name the VM of every claim, by its UID; two pods of one VM by their pods."""
    claims = [claim for node in view.nodes.values() for claim in node.ledger.claims.values()]
    times = Counter(map(_name, claims))
    return {claim.uid: _name(claim) if times[_name(claim)] == 1 else _pod(claim) for claim in claims}


def _given_out(machine: NodeMachine) -> Topology:
    """The topology with the CPUs reserved that the node does not give out."""
    if not machine.is_narrowed:
        return machine.topology
    return replace(machine.topology, reserved=CpuMask(machine.topology.cpus & ~machine.allocatable))


def _occupant(name: str, view: ClusterView, node: NodeView, claim: Claim) -> Occupant:
    vm = view.vms.get(claim.uid)
    known = _as_claimed(vm, claim) if vm is not None and claim.relocation is None else None
    if known is not None:
        return Occupant(name, *known)
    topology = node.machine.topology if isinstance(node.machine, NodeMachine) else None
    return occupant_of_claim(name, claim, topology)


def _as_claimed(vm: VmView, claim: Claim) -> tuple[Request, Placement] | None:
    """The VM's own request and placement, where they report what its claim states."""
    if vm.request is None or vm.placement is None:
        return None
    placement = vm.placement.placement
    if (placement.cpus, placement.owned) != (claim.cpus, claim.owned):
        return None
    options = vm.placement.options or vm.request.request.options
    return replace(vm.request.request, options=options), placement


def _name(claim: Claim) -> str:
    return f"{claim.namespace}/{claim.vmi or claim.pod}"


def _pod(claim: Claim) -> str:
    return f"{claim.namespace}/{claim.pod}"
