"""Which CPUs and memory nodes each container of the node gets.

A container with a claim gets the CPUs of its placement. Every other container gets the shared pool: the
online CPUs that no VM owns. Nothing is decided from what was decided before: equal states give equal
answers, so an agent that was killed goes on where it stopped.

Before a claim gets its CPUs it is judged against what really runs here. The containers of a refused claim
stay on the shared pool. The hook sidecar of its pod gets the claim's CPUs, too, as far as no accepted claim
owns them: it sees owned CPUs in its own cpuset and keeps the VM waiting. A claim that is already in effect
keeps what is left of its CPUs, because taking them away would move a running VM.

Promises, for every state: no set is empty; a CPU that an accepted claim owns is only in the sets of the
containers that run this claim.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from kvplace.agent.conditions import PinnedReason
from kvplace.agent.containers import Container
from kvplace.agent.node_state import NodeState
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.errors import BadAnnotation
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, NumaId, PodUid

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CpuSetting:
    """The wanted cpuset of one container."""

    cpus: CpuMask
    """Never empty."""
    mems: tuple[NumaId, ...] | None = None
    """NUMA nodes that give it memory; None where they are left as they are."""


@dataclass(frozen=True, slots=True)
class ClaimRefusal:
    """Why the claim of one pod does not get its CPUs."""

    reason: PinnedReason
    message: str
    """One sentence for the owner of the refused pod, without names of other tenants."""
    owner: str = ""
    """The pod that has its CPUs, for the log of the node."""


@dataclass(frozen=True, slots=True)
class Cpusets:
    """The answer for one node."""

    pool: CpuMask
    """The shared pool; never empty."""
    settings: Mapping[ContainerId, CpuSetting]
    """Empty on a node that is only observed."""
    refused: Mapping[PodUid, ClaimRefusal]
    """Pods with a claim that does not get its CPUs, and why."""
    confirmed: Mapping[PodUid, int] = field(default_factory=lambda: MappingProxyType({}))
    """The confirmed revisions that were known: until then a cpuset has the CPUs of older ones, too."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """A pod of this node that runs here and has a placement with CPUs."""

    uid: PodUid
    name: str
    placement: Placement
    revision: int
    reach: CpuMask
    """CPUs that its threads may use as far as no other client owns them."""
    in_force: bool
    """Whether one of its containers has its CPUs already, or during a relocation those of before."""

    @property
    def needs(self) -> CpuMask:
        """CPUs that it cannot do without."""
        return self.placement.owned | mask_of(self.placement.vcpus)


def decide_cpusets(state: NodeState, containers: Iterable[Container]) -> Cpusets:
    """State what each container gets, created ones as running ones."""
    known = sorted(containers, key=lambda container: container.id)
    claims = _claims(state, known)
    accepted, refused = _judge(state, claims)
    owned = _union(claim.placement.owned for claim in accepted.values())
    held = _held(state, claims, owned)
    pool = state.topology.cpus & ~owned & ~_union(held.values())
    pods = {claim.uid: claim for claim in claims}
    settings: dict[ContainerId, CpuSetting] = {}
    for container in () if state.observes_only else known:
        claim = pods.get(container.pod_uid)
        setting = CpuSetting(pool)
        if claim is not None and container.runs_claim and claim.uid in accepted:
            own = claim.placement.owned | held.get(claim.uid, NO_CPUS)
            arriving = container.incoming and not _is_confirmed(state, claim.uid, claim.revision)
            cpus = (claim.reach | (pool if arriving else NO_CPUS)) & (pool | own) & state.topology.cpus
            setting = CpuSetting(cpus or pool, _memory_nodes(state, claim))
        elif claim is not None and container.runs_claim:
            setting = CpuSetting(pool & ~claim.placement.owned or pool)
        elif claim is not None and claim.uid in refused:
            setting = CpuSetting(pool | claim.placement.owned & state.topology.cpus & ~owned)
        settings[container.id] = setting
    return Cpusets(pool, settings, refused, state.confirmed)


def placement_of(state: NodeState, container: Container) -> PodPlacement | None:
    """The newest placement of a container's pod, from the pod watch or as its sandbox was created with."""
    watched = state.placements.get(container.pod_uid)
    annotated = _read_placement(container.placement) if container.placement else None
    if annotated is not None and (annotated.pod_uid, annotated.node) != (container.pod_uid, state.node):
        annotated = None
    if watched is None or annotated is None:
        return watched or annotated
    return watched if watched.revision >= annotated.revision else annotated


@lru_cache(maxsize=1024)
def _read_placement(text: str) -> PodPlacement | None:
    try:
        return PodPlacement.from_json(text)
    except BadAnnotation as error:
        log.warning("the placement of a sandbox cannot be read: %s", error)
        return None


def _claims(state: NodeState, containers: Iterable[Container]) -> list[_Claim]:
    """List the pods with a claim; those in effect first, then those that the ledger knows, each by UID."""
    pods: dict[PodUid, list[Container]] = {}
    for container in containers:
        if container.placement or container.pod_uid in state.placements:
            pods.setdefault(container.pod_uid, []).append(container)
    claims = []
    for uid, members in pods.items():
        bound = max(
            filter(None, (placement_of(state, container) for container in members)),
            key=lambda bound: bound.revision,
            default=None,
        )
        if bound is None or bound.placement.floats:
            continue
        reach = _reach(state, bound)
        claims.append(
            _Claim(
                uid=uid,
                name=f"{members[0].namespace}/{members[0].pod}",
                placement=bound.placement,
                revision=bound.revision,
                reach=reach,
                in_force=any(
                    container.runs_claim
                    and not container.cpus & ~reach
                    and any(_has(container.cpus, each, state.topology.cpus) for each in _kept(state, bound))
                    for container in members
                ),
            )
        )
    return sorted(claims, key=lambda claim: (not claim.in_force, not _is_owner(state, claim), claim.uid))


def _kept(state: NodeState, bound: PodPlacement) -> Iterator[Placement]:
    """The placements that a pod may be running with."""
    yield bound.placement
    claim = state.ledger.claims.get(bound.pod_uid)
    relocation = None if claim is None else claim.relocation
    if relocation is not None and relocation.previous is not None:
        yield relocation.previous.placement


def _has(cpus: CpuMask, placement: Placement, online: CpuMask) -> bool:
    """Whether a cpuset has what a placement owns; where that is nothing, any of its CPUs."""
    owned = placement.owned & online
    if placement.owned:
        return bool(owned) and not owned & ~cpus
    return bool(cpus & (mask_of(placement.vcpus) or placement.cpus))


def _is_owner(state: NodeState, claim: _Claim) -> bool:
    return all(state.ledger.owners.get(cpu) == claim.uid for cpu in cpus_of(claim.placement.owned))


def _reach(state: NodeState, bound: PodPlacement) -> CpuMask:
    placement = bound.placement
    if placement.policy is Policy.NUMA:
        reach = _union(node.cpus for node in state.topology.numa_nodes if node.cpus & placement.cpus)
    else:
        reach = placement.cpus | placement.owned | placement.emulator_cpus
        reach |= _union(placement.io_thread_cpus)
    # Until the threads are seen to follow a revision they run where the one before it put them.
    before = state.ledger.claims.get(bound.pod_uid)
    if before is not None and not _is_confirmed(state, bound.pod_uid, bound.revision):
        reach |= before.cpus | before.owned
    return reach


def _is_confirmed(state: NodeState, uid: PodUid, revision: int) -> bool:
    return state.confirmed.get(uid, 0) >= revision


def _judge(
    state: NodeState, claims: Iterable[_Claim]
) -> tuple[dict[PodUid, _Claim], dict[PodUid, ClaimRefusal]]:
    accepted: dict[PodUid, _Claim] = {}
    refused: dict[PodUid, ClaimRefusal] = {}
    for claim in claims:
        refusal = _refusal(state, claim, accepted)
        if refusal is None:
            accepted[claim.uid] = claim
        else:
            refused[claim.uid] = refusal
    return accepted, refused


def _refusal(state: NodeState, claim: _Claim, accepted: Mapping[PodUid, _Claim]) -> ClaimRefusal | None:
    online = state.topology.cpus
    exclusive = claim.placement.owned if claim.in_force else claim.needs
    for other in accepted.values():
        if common := exclusive & other.placement.owned:
            return ClaimRefusal(
                PinnedReason.CPUS_IN_USE,
                f"CPU {format_cpu_list(common)} is in use by another pod, which owns it.",
                f"pod {other.name} ({other.uid})",
            )
    last = claim.placement.owned & online
    if not online & ~last & ~_union(other.placement.owned for other in accepted.values()):
        return ClaimRefusal(
            PinnedReason.NO_SHARED_POOL,
            f"CPU {format_cpu_list(last)} is the last of the shared pool; reserve a CPU for others.",
        )
    if claim.in_force:
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


def _held(state: NodeState, claims: Iterable[_Claim], owned: CpuMask) -> dict[PodUid, CpuMask]:
    """CPUs that stay out of the shared pool for a pod though no accepted claim owns them.

    They are those of a pod that is not here yet or has a refused claim, those that a relocation leaves or
    goes to, and those of a pod that has ended and was not released yet. Where they would leave no shared pool
    they do not count, those that only the ledger knows first.
    """
    free = state.topology.cpus & ~owned
    here = {claim.uid: claim.placement.owned & free for claim in claims}
    everywhere = dict(here)
    for cpu, owner in state.ledger.owners.items():
        everywhere[owner] = everywhere.get(owner, NO_CPUS) | mask_of([cpu]) & free
    return next((held for held in (everywhere, here) if free & ~_union(held.values())), {})


def _memory_nodes(state: NodeState, claim: _Claim) -> tuple[NumaId, ...] | None:
    """NUMA nodes of a claim; None for one that never had any of its own.

    During a relocation the nodes of both revisions, as for CPUs.
    """
    present = [node.id for node in state.topology.numa_nodes if node.memory]
    if claim.placement.numa_memory is not NumaMemory.STRICT:
        return tuple(present) or None if claim.revision > 1 else None
    wanted = set(claim.placement.memory_nodes)
    before = state.ledger.claims.get(claim.uid)
    if before is not None and not _is_confirmed(state, claim.uid, claim.revision):
        wanted |= {node for node, count in before.memory.items() if count}
    return tuple(node for node in present if node in wanted) or None


def _union(sets: Iterable[CpuMask]) -> CpuMask:
    union = NO_CPUS
    for cpus in sets:
        union |= cpus
    return union
