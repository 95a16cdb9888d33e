"""Bind on nodes where dra-driver-cpu sets the cpusets (`enforcement: dra`, experimental).

The driver gives a container the CPUs that its ResourceClaim names, and leaves their choice to kvplace. So
Bind writes the CPUs that the pod owns in the ledger into the allocation of its resource claim: after the
ledger claim, and before the binding. The ledger stays the owner.

A crash between the writes loses nothing. The pod is not bound, so kube-scheduler starts over: it allocates
again a resource claim that was cleared. One that was written is found as it is, or is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from kvplace.core.allocator.available_units import cpus_owned
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import Misconfigured, Refused
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted
from kvplace.core.request import Request
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.kube.object_records import PodRecord, ResourceClaimRecord
from kvplace.kube.resource_claims import (
    CAPACITY,
    CLEARED,
    allocated_cpus,
    has_cpus,
    name_of,
    requested_cpus,
    requests_cpus,
    with_cpus,
)
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable
from kvplace.scheduler.claim_placements import rfc3339
from kvplace.scheduler.claimed_devices import ClaimedDevices
from kvplace.scheduler.extender_protocol import BindingArgs

_WITHOUT_CLAIM = (
    f"dra-driver-cpu sets the cpusets there, and the pod has no ResourceClaim with {CAPACITY}: "
    "add one, or keep the pod away from the node"
)


class ClaimStatusWriter(Protocol):
    """The cluster call of handing over CPUs."""

    async def write_claim_status(self, claim: ResourceClaimRecord, status: Mapping[str, Any]) -> str:
        """Change allocation and reservedFor of a ResourceClaim, None removes one; returns its new version.

        Raises Conflict if it has changed since `claim` was read, and Refused if it is gone.
        """
        ...


class DraEnforcement:
    """Refuses pods that the driver cannot serve, and hands CPUs over to it."""

    def __init__(
        self,
        cluster: ClaimStatusWriter,
        cache: NodeCache,
        devices: ClaimedDevices,
        now: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._devices = devices
        self._now = now

    def refusals(self, pod: PodRecord, request: Request, names: Collection[NodeName]) -> dict[NodeName, str]:
        """Return the nodes that Filter refuses to a pod because of its resource claims for CPUs, and why.

        Bind alone knows what the watch has not shown yet, and requests without a number of CPUs.
        """
        nodes = self._cache.dra_nodes.intersection(names)
        if not nodes:
            return {}
        known = (self._cache.dra.claims.get((pod.namespace, name)) for name in pod.resource_claims)
        claims = [claim for claim in known if claim is not None and requests_cpus(claim)]
        if pod.resource_claims and not claims:
            return {}
        if problem := _not_one(claims):
            return dict.fromkeys(nodes, problem)
        (claim,) = claims
        try:
            count = requested_cpus(claim)
        except Refused as error:
            return dict.fromkeys(nodes, str(error))
        problems = {node: _wrong_number(claim, count, self._will_own(node, request)) for node in nodes}
        return {node: problem for node, problem in problems.items() if problem}

    def _will_own(self, node: NodeName, request: Request) -> int | None:
        machine = self._cache.machine(node)
        return None if isinstance(machine, Unusable) else cpus_owned(machine.topology, request)

    async def claims(self, args: BindingArgs) -> Sequence[ResourceClaimRecord] | None:
        """Read the resource claims for CPUs of a pod; None where the agent sets the cpusets."""
        if self._cache.enforcement(args.node) is not Enforcement.DRA:
            return None
        return [claim for claim in await self._devices.claims(args) if has_cpus(claim)]

    async def give(self, claim: ResourceClaimRecord, owned: CpuMask) -> None:
        """Write CPUs into the allocation of a resource claim, unless they are there.

        Raises Conflict if another client has changed it since it was read.
        """
        status = with_cpus(claim, owned, rfc3339(self._now()))
        if status is None:
            return
        try:
            version = await self._cluster.write_claim_status(claim, CLEARED)
            await self._cluster.write_claim_status(replace(claim, resource_version=version), status)
        except Misconfigured as error:
            raise Misconfigured(f"{error}; enforcement dra needs the component dra-driver-cpu") from error


def check_cpus(args: BindingArgs, claims: Sequence[ResourceClaimRecord], placement: Placement) -> None:
    """Raise Refused where the resource claims of a pod do not hold just the CPUs of its placement."""
    if problem := _problem(args.uid, claims, placement):
        raise Refused(f"node {args.node}: {problem}")


def _problem(pod: PodUid, claims: Sequence[ResourceClaimRecord], placement: Placement) -> str:
    if problem := _not_one(claims):
        return problem
    (claim,), owned = claims, placement.owned
    shared = placement.cpus & ~owned
    for cpus in (placement.emulator_cpus, *placement.io_thread_cpus):
        shared |= cpus & ~owned
    if shared:
        return (
            f"dra-driver-cpu gives a pod only CPUs that it owns, and this pod would also use CPU "
            f"{format_cpu_list(shared)}: set kvplace.io/cpu-policy to exclusive and "
            "kvplace.io/emulator-threads to isolate or with-vcpus"
        )
    return _wrong_number(claim, allocated_cpus(claim, pod), owned.bit_count())


def _not_one(claims: Sequence[ResourceClaimRecord]) -> str:
    """Return why a pod cannot have these resource claims with CPUs: it needs one; empty if it has."""
    if not claims:
        return _WITHOUT_CLAIM
    if len(claims) > 1:
        names = ", ".join(sorted(name_of(claim) for claim in claims))
        return f"{names} all have CPUs: request the CPUs of a pod in one ResourceClaim"
    return ""


def _wrong_number(claim: ResourceClaimRecord, count: int, owned: int | None) -> str:
    """Return why a resource claim cannot have so many CPUs; empty if the pod owns as many.

    `owned` is None where that is not certain.
    """
    if owned in (None, count):
        return ""
    return (
        f"{name_of(claim)} has {counted(count, 'CPU')}, and the pod owns {owned}: "
        f"set {CAPACITY} of its request to {owned}"
    )
