"""The pods with a placement whose containers are on this node, each with what it should look like."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kvplace.agent.containers import Container
from kvplace.agent.cpusets import Cpusets, placement_of
from kvplace.agent.enforced_containers import EnforcedContainers
from kvplace.agent.node_state import NodeState
from kvplace.agent.pinning_sweep import Target
from kvplace.agent.verification import Wanted
from kvplace.agent.watched_pod import ClaimContainer
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, CpuMask, PodUid
from kvplace.linux.kernel_files import Gone


class PlacementsInForce(Protocol):
    """Which placement each pod should have now."""

    def target(self, uid: PodUid) -> PodPlacement | None:
        """Return the newest placement of a pod, or the one before while the newest has failed."""
        ...


@dataclass(frozen=True, slots=True)
class ClaimHere:
    """A pod with a placement whose containers exist here."""

    uid: PodUid
    namespace: str
    pod: str
    placement: PodPlacement
    confirmed: int
    """The revision that its threads have been seen to follow; 0: none."""
    settled: bool
    """Whether its cpuset was decided after that, and so without the CPUs of older revisions."""
    target: Target


def claims_here(
    state: NodeState, enforced: EnforcedContainers, placements: PlacementsInForce
) -> Iterator[ClaimHere]:
    """List the pods with a placement that have containers here which run their claims."""
    pods: dict[PodUid, list[Container]] = {}
    for container in enforced.containers():
        if container.runs_claim:
            pods.setdefault(container.pod_uid, []).append(container)
    cpusets = enforced.cpusets()
    for uid, members in pods.items():
        bound = placements.target(uid) if uid in state.placements else placement_of(state, members[0])
        if bound is not None:
            yield ClaimHere(
                uid=uid,
                namespace=members[0].namespace,
                pod=members[0].pod,
                placement=bound,
                confirmed=state.confirmed.get(uid, 0),
                settled=cpusets.confirmed.get(uid, 0) >= bound.revision,
                target=_target(state, enforced, cpusets, bound, members),
            )


def _target(
    state: NodeState,
    enforced: EnforcedContainers,
    cpusets: Cpusets,
    bound: PodPlacement,
    members: list[Container],
) -> Target:
    uid = members[0].pod_uid
    cgroups = []
    for container in members:
        with suppress(Gone):  # created and not started, or ended
            cgroups.append(ClaimContainer(container.name, enforced.cgroup_of(container.id)))
    setting = cpusets.settings.get(members[0].id)
    return Target(
        uid=uid,
        containers=tuple(sorted(cgroups, key=lambda cgroup: cgroup.name)),
        wanted=Wanted(
            placement=bound.placement,
            cpuset=NO_CPUS if setting is None else setting.cpus,
            online=CpuMask(state.topology.cpus),
            vm=members[0].in_vm_pod,
        ),
        refusal=cpusets.refused.get(uid),
        sets_threads=setting is not None,
    )
