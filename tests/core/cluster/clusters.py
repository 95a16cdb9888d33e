"""Small clusters and many VMs for them, for property tests of plans; and what makes a plan right."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.cluster.node_choice import Candidate, Strategy, best_candidate
from kvplace.core.cluster.planning import Tally, VmRequest
from kvplace.core.free import free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.occupant import Occupant
from kvplace.core.placement import Placement
from kvplace.core.request import Policy, Smt
from tests.core.allocator.running import occupied
from tests.core.allocator.validity import check_cpus
from tests.core.machines import OFFERED_SCOPES, SPREAD_SCOPES, requests, topologies

ANY_REQUEST = requests(
    most_vcpus=8,
    scopes=(*OFFERED_SCOPES, *SPREAD_SCOPES),
    policies=(Policy.EXCLUSIVE, Policy.EXCLUSIVE, Policy.SHARE, Policy.IMMOVABLE, Policy.NUMA),
)


@st.composite
def clusters(draw: st.DrawFn, *, most_nodes: int = 4, most_cpus: int = 12) -> list[ClusterNode]:
    """Nodes of one or two machine types, with VMs that run there."""
    machines = draw(st.lists(topologies(most_cpus=most_cpus), min_size=1, max_size=2))
    nodes = []
    for number in range(draw(st.integers(1, most_nodes))):
        machine = draw(st.sampled_from(machines))
        running = draw(occupied(machine, ANY_REQUEST, most=3)) if draw(st.booleans()) else []
        renamed = tuple(Occupant(f"node-{number}/{vm.id}", vm.request, vm.placement) for vm in running)
        nodes.append(ClusterNode(f"node-{number}", machine, renamed))
    return nodes


wanted_vms = st.lists(ANY_REQUEST, min_size=1, max_size=10).map(
    lambda found: [VmRequest(f"vm-{number}", request) for number, request in enumerate(found)]
)


def one_by_one(nodes: Sequence[ClusterNode], wanted: Sequence[VmRequest], strategy: Strategy) -> Tally:
    """Count what finds room when every VM goes where Filter sends it, as it comes."""
    claims = {node.name: [claim_of(vm.id, vm.placement) for vm in node.running] for node in nodes}
    vms = vcpus = 0
    for vm in wanted:
        candidates = []
        for node in nodes:
            free = free_of(node.topology, Ledger(), claims[node.name])
            answer = place(node.topology, free, vm.request)
            if isinstance(answer, Placement):
                candidates.append(Candidate(node.name, node.topology, answer, free, vm.request.vcpus))
        best = best_candidate(candidates, strategy)
        if best is not None:
            claims[best.node].append(claim_of(vm.id, best.placement))
            vms += 1
            vcpus += vm.request.vcpus
    return Tally(vms, vcpus)


def check_sound(node: ClusterNode, occupants: Sequence[Occupant]) -> None:
    """Nobody has what another one has, and nobody what the node does not have."""
    for vm in occupants:
        others = [claim_of(other.id, other.placement) for other in occupants if other is not vm]
        free = free_of(node.topology, Ledger(), others)
        if vm.request.owns_cpus or vm.request.options.smt is Smt.PREFER:
            check_cpus(node.topology, free, vm.request, vm.placement)
        else:  # whole cores when it came; their other threads may have found an owner since
            assert not vm.placement.cpus & ~free.pool
    claims = [claim_of(vm.id, vm.placement) for vm in occupants]
    left = free_of(node.topology, Ledger(), claims)
    assert all(count >= 0 for _, count in left.memory)
    assert all(count >= 0 for _, _, count in left.huge_pages)
