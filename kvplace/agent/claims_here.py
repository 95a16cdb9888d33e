"""The pods with a placement and containers on this node, each with its desired state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from kvplace.agent.containers import Container
from kvplace.agent.cpusets import Cpusets, placement_of
from kvplace.agent.enforced_containers import EnforcedContainers
from kvplace.agent.node_state import NodeState
from kvplace.agent.own_node import OwnNode
from kvplace.agent.pinning_sweep import SweptPod
from kvplace.agent.verification import Wanted
from kvplace.agent.watched_pod import ClaimContainer
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, CpuMask, PodUid
from kvplace.linux.kernel_files import Gone

_SHOWN = 13
"""Characters of the id that stands for a name that is not known, as many as `crictl ps` shows."""


class PlacementsInForce(Protocol):
    """Which placement each pod should have now."""

    def target(self, uid: PodUid) -> PodPlacement | None:
        """Return the newest placement of a pod, or the one before while the newest has failed."""
        ...


@dataclass(frozen=True, slots=True)
class ClaimHere:
    """A pod with a placement and with containers here."""

    uid: PodUid
    namespace: str
    pod: str
    placement: PodPlacement
    confirmed: int
    """The revision that its threads have been seen to follow; 0: none."""
    settled: bool
    """Whether its cpuset was decided after that, and so without the CPUs of older revisions."""
    target: SweptPod


class ClaimsHere:
    """Follows them; nothing is made anew while nothing has changed."""

    def __init__(self, own: OwnNode, enforced: EnforcedContainers, placements: PlacementsInForce) -> None:
        self._own = own
        self._enforced = enforced
        self._placements = placements
        self._made_of: tuple[object, ...] = ()
        self._claims: Mapping[PodUid, ClaimHere] = {}

    def now(self) -> Mapping[PodUid, ClaimHere]:
        """Return the pods with a placement that have containers here which run their claims."""
        state = self._own.state
        cpusets = self._enforced.cpusets()
        members = [
            _Member(container, self._cgroup(container), self._placement(state, container))
            for container in self._enforced.containers()
            if container.runs_claim
        ]
        made_of = (members, cpusets, state.confirmed, state.topology)
        if made_of != self._made_of:
            self._claims = {claim.uid: claim for claim in _claims(state, cpusets, members)}
            self._made_of = made_of
        return self._claims

    def _cgroup(self, container: Container) -> Path | None:
        try:
            return self._enforced.cgroup_of(container.id)
        except Gone:
            return None  # created and not started, or ended

    def _placement(self, state: NodeState, container: Container) -> PodPlacement | None:
        if container.pod_uid in state.placements:
            return self._placements.target(container.pod_uid)
        return placement_of(state, container)


class _Member(NamedTuple):
    """A container that runs a claim."""

    container: Container
    cgroup: Path | None
    placement: PodPlacement | None
    """Of its pod."""


def _claims(state: NodeState, cpusets: Cpusets, members: Iterable[_Member]) -> Iterator[ClaimHere]:
    pods: dict[PodUid, list[_Member]] = {}
    for member in members:
        pods.setdefault(member.container.pod_uid, []).append(member)
    for uid, of_pod in pods.items():
        container, _, bound = of_pod[0]
        if bound is not None:
            yield ClaimHere(
                uid=uid,
                namespace=container.namespace,
                pod=container.pod,
                placement=bound,
                confirmed=state.confirmed.get(uid, 0),
                settled=cpusets.confirmed.get(uid, 0) >= bound.revision,
                target=_target(state, cpusets, bound, of_pod),
            )


def _target(state: NodeState, cpusets: Cpusets, bound: PodPlacement, members: Iterable[_Member]) -> SweptPod:
    containers = [member.container for member in members]
    setting = cpusets.settings.get(containers[0].id)
    cgroups = [
        ClaimContainer(container.name or container.id[:_SHOWN], cgroup)
        for container, cgroup, _ in members
        if cgroup is not None
    ]
    return SweptPod(
        uid=containers[0].pod_uid,
        containers=tuple(sorted(cgroups, key=lambda cgroup: cgroup.name)),
        wanted=Wanted(
            placement=bound.placement,
            cpuset=NO_CPUS if setting is None else setting.cpus,
            online=CpuMask(state.topology.cpus),
            vm=containers[0].in_vm_pod,
        ),
        refusal=cpusets.refused.get(containers[0].pod_uid),
        sets_threads=setting is not None,
    )
