"""Plans the CPUs and memory nodes of each container of the node, and the state of each pod with a placement.

A container with a claim gets the CPUs of its placement. Every other container gets the shared pool: the
online CPUs that no VM owns. A plan does not depend on the plan before: equal states give equal plans, so
an agent that was killed continues where it stopped.

Before a claim gets its CPUs it is judged against the containers that run here. The containers of a refused
claim stay on the shared pool. The hook sidecar of its pod gets the claim's CPUs, too, as far as no accepted
claim owns them: it sees owned CPUs in its own cpuset and keeps the VM waiting. A claim that is already in
effect keeps the CPUs that are left of it, because taking them away would move a running VM.

While the newest revision of a placement is not confirmed, a pod may use the CPUs of both revisions; both are
its own. One that was given up leaves the revision before it in effect.

Promises, for every state: no set is empty; a CPU that an accepted claim owns is only in the sets of the
containers that run this claim.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from kvplace.agent.conditions import PinnedReason
from kvplace.agent.node_plan import (
    ClaimContainer,
    ClaimRefusal,
    NodeContainer,
    NodePlan,
    PodPlan,
    PodRevisions,
    ThisNode,
)
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, union
from kvplace.core.errors import BadAnnotation
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, PodUid
from kvplace.nri.values import NO_CPUSET, Cpuset

log = logging.getLogger(__name__)

SHOWN_OF_ID = 13
"""Characters of the id that stands for a name that is not known, as many as `crictl ps` shows."""


def plan_node(state: ThisNode, containers: Iterable[NodeContainer]) -> NodePlan:
    """Plan each container and each pod, created ones as running ones.

    Until the objects of the node are known, each container keeps the CPUs of its runtime's spec, without the
    CPUs that its cgroup has lost: the agent before may have ended before it informed the runtime.
    """
    known = sorted(containers, key=lambda container: container.id)
    claims = _claims(state, known)
    accepted, refused = _judge(state, claims)
    owned = union(claim.placement.owned for claim in accepted)
    held = _held(state, claims, owned)
    pool = CpuMask(state.topology.cpus & ~owned & ~union(held.values()))
    settings: dict[ContainerId, Cpuset] = {}
    for container in () if state.observes_only else known:
        claim = claims.get(container.pod_uid)
        setting = Cpuset(pool)
        if claim is None or claim.placement.floats:
            pass
        elif not container.runs_claim:
            if claim.uid in refused:
                setting = Cpuset(CpuMask(pool | claim.placement.owned & state.topology.cpus & ~owned))
        elif claim.uid in refused:
            setting = Cpuset(CpuMask(pool & ~claim.placement.owned) or pool)
        else:
            own = claim.placement.owned | held.get(claim.uid, NO_CPUS)
            arriving = container.incoming and not _is_confirmed(claim)
            cpus = (claim.reach | (pool if arriving else NO_CPUS)) & (pool | own) & state.topology.cpus
            setting = Cpuset(CpuMask(cpus) or pool, _memory_nodes(state, claim))
        settings[container.id] = setting
    pods = {}
    for uid, claim in claims.items():
        members = [container for container in known if container.pod_uid == uid and container.runs_claim]
        if members:
            pods[uid] = _with_containers(state, claim, members, settings.get(members[0].id), refused.get(uid))
    online = CpuMask(state.topology.cpus)
    if not state.is_known:
        kept = () if state.observes_only else known
        return NodePlan(pool, online, {one.id: _as_before(one) for one in kept if one.spec.cpus})
    return NodePlan(pool, online, settings, pods, refused, is_complete=True)


def setting_of_new(state: ThisNode, containers: Collection[NodeContainer], new: ContainerId) -> Cpuset:
    """Plan a new container while only its own sandbox states its placement.

    It gets no CPU that a container with a claim may use.
    """
    setting = plan_node(replace(state, is_known=True), containers).containers.get(new)
    if setting is None:
        return NO_CPUSET
    placements = placements_in(state, containers)
    used = union(
        other.spec.cpus
        for other in containers
        if other.id != new
        and other.runs_claim
        and other.pod_uid in placements
        and placements[other.pod_uid].newest.placement.owned
    )
    return replace(setting, cpus=CpuMask(setting.cpus & ~used) or setting.cpus)


def _as_before(container: NodeContainer) -> Cpuset:
    has = container.cpus
    return replace(container.spec, cpus=has) if has and not has & ~container.spec.cpus else container.spec


def _with_containers(
    state: ThisNode,
    claim: PodPlan,
    members: Iterable[NodeContainer],
    setting: Cpuset | None,
    refusal: ClaimRefusal | None,
) -> PodPlan:
    cgroups = [
        ClaimContainer(container.name or container.id[:SHOWN_OF_ID], container.folder)
        for container in members
        if container.folder is not None
    ]
    expected = claim.placement.owned if state.follows_claims and refusal is None else NO_CPUS
    return replace(
        claim,
        containers=tuple(sorted(cgroups, key=lambda cgroup: cgroup.name)),
        cpuset=expected if setting is None else setting.cpus,
        sets_threads=setting is not None,
        refusal=refusal,
    )


def placements_in(state: ThisNode, containers: Iterable[NodeContainer]) -> Mapping[PodUid, PodRevisions]:
    """Find the revisions of each pod with containers here: as watched, or newer ones of a sandbox."""
    found: dict[PodUid, PodRevisions] = {}
    for container in containers:
        known = found.get(container.pod_uid) or state.pods.get(container.pod_uid)
        annotated = _annotated(state, container)
        if annotated is not None and (known is None or annotated.revision > known.newest.revision):
            known = PodRevisions(annotated) if known is None else known.with_newest(annotated)
        if known is not None:
            found[container.pod_uid] = known
    return found


def _annotated(state: ThisNode, container: NodeContainer) -> PodPlacement | None:
    """Read the pod's own placement as its sandbox was created with."""
    found = _read_placement(container.placement) if container.placement else None
    if found is None or (found.pod_uid, found.node) != (container.pod_uid, state.node):
        return None
    return found


@lru_cache(maxsize=1024)
def _read_placement(text: str) -> PodPlacement | None:
    try:
        return PodPlacement.from_json(text)
    except BadAnnotation as error:
        log.warning("the placement of a sandbox cannot be read: %s", error)
        return None


def _claims(state: ThisNode, containers: Iterable[NodeContainer]) -> dict[PodUid, PodPlan]:
    """List the pods with a placement, by UID: first pods with their CPUs, then pods in the ledger."""
    members: dict[PodUid, list[NodeContainer]] = {}
    for container in containers:
        members.setdefault(container.pod_uid, []).append(container)
    claims = []
    for uid, revisions in placements_in(state, containers).items():
        bound = revisions.in_effect(state.ledger)
        undone = bound is not revisions.newest
        here = members[uid]
        reach = _reach(state, revisions, bound)
        claims.append(
            PodPlan(
                uid=uid,
                namespace=here[0].namespace,
                pod=here[0].pod,
                vm=here[0].in_vm_pod,
                bound=bound,
                online=CpuMask(state.topology.cpus),
                confirmed=revisions.confirmed,
                failed_revision=revisions.newest.revision if undone else 0,
                failure=revisions.failure if undone else "",
                reach=reach,
                has_its_cpus=any(
                    container.runs_claim
                    and not container.cpus & ~reach
                    and any(
                        _has(container.cpus, kept, state.topology.cpus)
                        for kept in _kept(state, revisions, bound)
                    )
                    for container in here
                ),
            )
        )
    claims.sort(key=lambda claim: (not claim.has_its_cpus, not _is_owner(state, claim), claim.uid))
    return {claim.uid: claim for claim in claims}


def _kept(state: ThisNode, revisions: PodRevisions, bound: PodPlacement) -> Iterator[Placement]:
    """The placements that a pod may be running with."""
    yield bound.placement
    claim = state.ledger.claims.get(bound.pod_uid)
    relocation = None if claim is None else claim.relocation
    if relocation is not None and relocation.previous is not None:
        yield relocation.previous.placement
    if revisions.failure:
        yield revisions.newest.placement


def _has(cpus: CpuMask, placement: Placement, online: CpuMask) -> bool:
    """Whether a cpuset has the CPUs that a placement owns; if it owns none, any of its CPUs."""
    owned = placement.owned & online
    if placement.owned:
        return bool(owned) and not owned & ~cpus
    return bool(cpus & (mask_of(placement.vcpus) or placement.cpus))


def _is_owner(state: ThisNode, claim: PodPlan) -> bool:
    return all(state.ledger.owners.get(cpu) == claim.uid for cpu in cpus_of(claim.placement.owned))


def _reach(state: ThisNode, revisions: PodRevisions, bound: PodPlacement) -> CpuMask:
    reach = _reach_of(state, bound.placement)
    # Until the threads are seen to follow a revision they run where the one before it put them.
    if revisions.confirmed < revisions.newest.revision:
        reach |= _reach_of(state, revisions.newest.placement)
        if before := state.ledger.claims.get(bound.pod_uid):
            reach |= before.cpus | before.owned
    return CpuMask(reach)


def _reach_of(state: ThisNode, placement: Placement) -> CpuMask:
    if placement.policy is Policy.NUMA:
        return union(node.cpus for node in state.topology.numa_nodes if node.cpus & placement.cpus)
    return union((placement.cpus, placement.owned, placement.emulator_cpus, *placement.io_thread_cpus))


def _is_confirmed(claim: PodPlan) -> bool:
    return claim.confirmed >= claim.newest_revision


def _judge(
    state: ThisNode, claims: Mapping[PodUid, PodPlan]
) -> tuple[list[PodPlan], dict[PodUid, ClaimRefusal]]:
    accepted: list[PodPlan] = []
    refused: dict[PodUid, ClaimRefusal] = {}
    for claim in claims.values():
        if claim.placement.floats:
            continue
        refusal = _refusal(state, claim, accepted)
        if refusal is None:
            accepted.append(claim)
        else:
            refused[claim.uid] = refusal
    return accepted, refused


def _refusal(state: ThisNode, claim: PodPlan, accepted: Iterable[PodPlan]) -> ClaimRefusal | None:
    online = state.topology.cpus
    exclusive = claim.placement.owned if claim.has_its_cpus else claim.needs
    for other in accepted:
        if common := exclusive & other.placement.owned:
            return ClaimRefusal(
                PinnedReason.CPUS_IN_USE,
                f"CPU {format_cpu_list(common)} is in use by another pod, which owns it.",
                f"pod {other.namespace}/{other.pod} ({other.uid})",
            )
    last = claim.placement.owned & online
    if not online & ~last & ~union(other.placement.owned for other in accepted):
        return ClaimRefusal(
            PinnedReason.NO_SHARED_POOL,
            f"CPU {format_cpu_list(last)} is the last of the shared pool; reserve a CPU for others.",
        )
    if claim.has_its_cpus:
        return None
    if missing := claim.needs & ~online:
        return ClaimRefusal(
            PinnedReason.CPUS_OFFLINE, f"CPU {format_cpu_list(missing)} is offline or does not exist."
        )
    if foreign := claim.needs & state.kubelet_cpus:
        return ClaimRefusal(
            PinnedReason.KUBELET_OWNS_CPUS,
            f"CPU {format_cpu_list(foreign)} is allocated by the kubelet's static CPU policy.",
        )
    for cpu in cpus_of(claim.needs):
        owner = state.ledger.owners.get(cpu, claim.uid)
        if owner != claim.uid:
            return ClaimRefusal(
                PinnedReason.OWNED_BY_ANOTHER_POD,
                f"CPU {cpu} belongs to another pod in the ledger.",
                f"pod {owner}",
            )
    return None


def _held(state: ThisNode, claims: Mapping[PodUid, PodPlan], owned: CpuMask) -> dict[PodUid, CpuMask]:
    """CPUs that stay out of the shared pool for a pod though no accepted claim owns them.

    They are CPUs of a pod that is not here yet or has a refused claim, old and new CPUs of a relocation, and
    CPUs of a pod that has ended and was not released yet. Where they would leave no shared pool they do not
    count; CPUs that only the ledger names are given up first.
    """
    free = CpuMask(state.topology.cpus & ~owned)
    here = {uid: CpuMask(claim.placement.owned & free) for uid, claim in claims.items()}
    everywhere = dict(here)
    for cpu, owner in state.ledger.owners.items():
        everywhere[owner] = CpuMask(everywhere.get(owner, NO_CPUS) | mask_of([cpu]) & free)
    return next((held for held in (everywhere, here) if free & ~union(held.values())), {})


def _memory_nodes(state: ThisNode, claim: PodPlan) -> CpuMask:
    """NUMA nodes of a claim; none for one that never had any of its own.

    During a relocation the nodes of both revisions, as for CPUs.
    """
    present = [node.id for node in state.topology.numa_nodes if node.memory]
    if claim.placement.numa_memory is not NumaMemory.STRICT:
        return mask_of(present) if claim.newest_revision > 1 else NO_CPUS
    wanted = set(claim.placement.memory_nodes)
    before = state.ledger.claims.get(claim.uid)
    if before is not None and not _is_confirmed(claim):
        wanted |= {node for node, count in before.memory.items() if count}
    return mask_of(node for node in present if node in wanted)
