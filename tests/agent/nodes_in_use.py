"""Nodes with VMs and plain pods on them, for tests of the agent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_plan import ClaimContainer, NodeContainer, PodPlan, PodRevisions, ThisNode
from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.scalars import NO_CPUS, Bytes, ContainerId, CpuId, CpuMask, NodeName, NumaId, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.objects import COMPUTE
from kvplace.kube.watches import Init, InitDone
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.nodes.machines import EIGHT

NODE = NodeName("worker-1")
VM, OTHER_VM, PLAIN = PodUid("uid-vm"), PodUid("uid-vm-2"), PodUid("uid-plain")
UIDS = (VM, OTHER_VM, PLAIN, PodUid("uid-4"))


def placed(
    uid: PodUid,
    cpus: str,
    *,
    policy: Policy = Policy.EXCLUSIVE,
    emulator: str = "",
    strict: tuple[NumaId, ...] = (),
    revision: int = 1,
) -> PodPlacement:
    """A placement with one vCPU on each of these CPUs, owned if it is exclusive, memory strict if named."""
    mask = parse_cpu_list(cpus)
    placement = Placement(
        policy,
        tuple(cpus_of(mask)),
        mask,
        owned=mask if policy is Policy.EXCLUSIVE else NO_CPUS,
        emulator_cpus=parse_cpu_list(emulator),
        numa_nodes=strict,
        numa_memory=NumaMemory.STRICT if strict else NumaMemory.OFF,
        memory=dict.fromkeys(strict, Bytes(1 << 30)),
    )
    return PodPlacement(uid, NODE, "", OnFailure.WAIT, placement, revision=revision)


def numa_placed(uid: PodUid, topology: Topology, *nodes: NumaId) -> PodPlacement:
    """A placement of policy `numa` on these NUMA nodes."""
    cpus = mask_of(cpu for node in nodes for cpu in cpus_of(topology.node_by_id[node].cpus))
    placement = Placement(Policy.NUMA, (), cpus, numa_nodes=nodes)
    return PodPlacement(uid, NODE, "", OnFailure.WAIT, placement)


def read_node(topology: Topology) -> NodeObjects:
    """The objects of a node, read from an API server that has none."""
    own = NodeObjects(NODE, topology)
    for store in own.stores:
        store.apply(Init())
        store.apply(InitDone())
    return own


def node_with(
    *placements: PodPlacement, topology: Topology = EIGHT, ledger: Ledger | None = None
) -> ThisNode:
    """A node whose pods have these placements, and a ledger that agrees unless another one is given."""
    claims = tuple(claim_of(bound.pod_uid, bound.placement) for bound in placements)
    return ThisNode(
        NODE,
        topology,
        Ledger().after(LedgerChange(claims)) if ledger is None else ledger,
        {bound.pod_uid: PodRevisions(bound) for bound in placements},
    )


def confirmed(state: ThisNode, uid: PodUid, revision: int) -> ThisNode:
    """The same node when the threads of a pod follow a revision."""
    return replace(state, pods={**state.pods, uid: replace(state.pods[uid], confirmed=revision)})


def planned(
    placement: Placement,
    *containers: ClaimContainer,
    cpuset: CpuMask,
    online: CpuMask,
    uid: PodUid = VM,
    vm: bool = True,
) -> PodPlan:
    """The plan for a pod with a placement."""
    bound = PodPlacement(uid, NODE, "", OnFailure.WAIT, placement)
    return PodPlan(uid, "vms", f"pod-of-{uid}", vm, bound, online, containers, cpuset)


def placed_otherwise(plan: PodPlan, placement: Placement) -> PodPlan:
    """The same plan with another placement."""
    return replace(plan, bound=replace(plan.bound, placement=placement))


def container(uid: PodUid, name: str = COMPUTE, *, cpus: str = "", in_vm_pod: bool = True) -> NodeContainer:
    """A container of a pod, by default the one with QEMU; its id is `UID/name`."""
    return NodeContainer(
        ContainerId(f"{uid}/{name}"),
        name,
        uid,
        "vms",
        f"pod-of-{uid}",
        in_vm_pod=in_vm_pod,
        cpus=parse_cpu_list(cpus),
    )


def machine_of(cpus: Iterable[int]) -> Topology:
    """A machine with these CPUs online, the even ones in NUMA node 0 and the odd ones in NUMA node 1."""
    mask = mask_of(cpus)
    even = CpuMask(mask & 0x5555555555555555)
    sides = [(number, side) for number, side in enumerate((even, mask & ~even)) if side]
    return make_topology(
        packages=[make_package(number, side) for number, side in sides],
        numa_nodes=[make_numa_node(number, side, 1 << 30) for number, side in sides],
        l3_groups=[side for _, side in sides],
        cores=[1 << cpu for cpu in cpus_of(mask)],
    )


_CPUS = st.integers(0, 9)
_cpu_sets = st.sets(_CPUS, max_size=5).map(mask_of)


@st.composite
def placements(draw: st.DrawFn, uid: PodUid) -> PodPlacement:
    """Any placement, on CPUs that the machine may lack or that others have."""
    policy = draw(st.sampled_from([Policy.EXCLUSIVE, *Policy]))
    order = draw(st.lists(_CPUS, min_size=1, max_size=4, unique=True))
    named = mask_of(order) | draw(_cpu_sets)
    owns = draw(st.sampled_from([NO_CPUS, mask_of(order), named]))
    nodes = tuple(draw(st.lists(st.integers(0, 2).map(NumaId), max_size=2, unique=True)))
    placement = Placement(
        policy,
        () if policy in (Policy.NUMA, Policy.NONE) else tuple(cpus_of(mask_of(order))),
        named,
        owned=owns if policy in (Policy.EXCLUSIVE, Policy.SHARE) else NO_CPUS,
        emulator_cpus=draw(_cpu_sets),
        io_thread_cpus=tuple(draw(st.lists(_cpu_sets, max_size=2))),
        numa_nodes=nodes,
        numa_memory=draw(st.sampled_from(NumaMemory)),
        memory=dict.fromkeys(nodes, Bytes(1 << 20)),
    )
    return PodPlacement(uid, NODE, "", OnFailure.WAIT, placement, revision=draw(st.integers(1, 3)))


@st.composite
def revisions(draw: st.DrawFn, newest: PodPlacement) -> PodRevisions:
    """Any progress of a pod's revisions; the newest may have been given up."""
    return PodRevisions(
        newest,
        confirmed=draw(st.integers(0, 3)),
        followed=draw(st.none() | placements(newest.pod_uid)),
        failure=draw(st.sampled_from(["", "vCPU 0 is elsewhere"])),
    )


@st.composite
def nodes_in_use(draw: st.DrawFn) -> tuple[ThisNode, list[NodeContainer]]:
    """Any state of a node, also ones that contradict themselves."""
    bound = {uid: draw(placements(uid)) for uid in UIDS}
    claims = {
        uid: claim_of(uid, draw(placements(uid)).placement) for uid in draw(st.sets(st.sampled_from(UIDS)))
    }
    owners = draw(st.dictionaries(_CPUS.map(CpuId), st.sampled_from(UIDS), max_size=8))
    state = ThisNode(
        NODE,
        machine_of(draw(st.sets(_CPUS, min_size=1))),
        Ledger(owners, claims),
        {uid: draw(revisions(bound[uid])) for uid in draw(st.sets(st.sampled_from(UIDS)))},
        kubelet_cpus=draw(_cpu_sets),
    )
    names = draw(
        st.lists(
            st.tuples(st.sampled_from(UIDS), st.sampled_from([COMPUTE, "hook-sidecar-0", "app"])),
            max_size=8,
            unique=True,
        )
    )
    containers = [
        NodeContainer(
            ContainerId(f"{uid}/{name}"),
            name,
            uid,
            "vms",
            f"pod-of-{uid}",
            in_vm_pod=uid != PLAIN,
            placement=bound[uid].to_json() if draw(st.booleans()) else "",
            cpus=draw(_cpu_sets),
            incoming=draw(st.booleans()),
        )
        for uid, name in names
    ]
    return state, containers
