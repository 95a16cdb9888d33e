"""ResourceClaims of pods in Filter and Bind: cores beside devices, and CPUs of dra-driver-cpu.

**Devices.** kube-scheduler allocates devices between Filter and Bind and does not name them. So Filter
refuses the nodes where no free device has room beside it, and ranks the others as if the first free devices
were allocated. Bind reads the resource claims of the pod from the API server, and places the pod beside their
devices. After a refused Bind the devices stay allocated, and kube-scheduler offers their node alone. It frees
them when Filter refuses that node. So Filter remembers the refusal until the ledger of the node changes.

**CPUs** (`enforcement: dra`, experimental). The driver gives a container the CPUs that its ResourceClaim
names, and leaves their choice to kvplace. So Bind writes the CPUs that the pod owns in the ledger into the
allocation of its resource claim: after the ledger claim, and before the binding. The ledger stays the owner.
A crash between the writes loses nothing. The pod is not bound, so kube-scheduler starts over: it allocates
again a resource claim that was cleared. One that was written is found as it is, or is written again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from kvplace.core.allocator.allocate import may_fit
from kvplace.core.allocator.available_units import cpus_owned
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import Misconfigured, Refused, Unavailable
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement, Refusal
from kvplace.core.quantity import counted
from kvplace.core.request import DeviceNuma, Request
from kvplace.core.scalars import CpuMask, NodeName, NumaId, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.claimed_cpus import (
    CAPACITY,
    CLEARED,
    allocated_cpus,
    has_cpus,
    name_of,
    requested_cpus,
    requests_cpus,
    with_cpus,
)
from kvplace.kube.concurrency import Turns, together
from kvplace.kube.object_records import DeviceKey, PodRecord, ResourceClaimRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeSnapshot, Unusable
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.extender_protocol import BindingArgs
from kvplace.scheduler.pending_pods import PendingPod, PendingPods, PendingRequest
from kvplace.scheduler.ranking import RememberedAnswers
from kvplace.scheduler.stored_claims import rfc3339

_MOST_CLAIMS = 64
"""The most resource claims of one pod that are read; devices of further claims constrain nothing."""
_NODE_STEPS = 1_000
"""Steps of checking a node for a pod with devices."""
_DEVICE_STEPS = 50
"""Steps of finding the first free devices of a node."""
_MOST_KEPT = 32
"""The most requests with remembered answers about room beside devices."""
_Places = tuple[frozenset[NumaId], tuple[tuple[str, frozenset[NumaId | None]], ...]]
"""The NUMA nodes of the pod's devices, and by driver the NUMA nodes of free devices."""
_STRICT = (DeviceNuma.REQUIRED, DeviceNuma.SOCKET)
_WITHOUT_CLAIM = (
    f"dra-driver-cpu sets the cpusets there, and the pod has no ResourceClaim with {CAPACITY}: "
    "add one, or keep the pod away from the node"
)


@dataclass(frozen=True, slots=True)
class NodesWithDevices:
    """The nodes of a Filter call, as far as ResourceClaims decide."""

    refused: dict[NodeName, str]
    """The refused nodes, each with the reason."""
    beside: dict[Request, list[NodeName]] = field(default_factory=dict)
    """The request beside the devices that the pod will probably get, with the nodes for each.

    Empty if no node has such devices on a known NUMA node.
    """


@dataclass(frozen=True, slots=True)
class ReadClaims:
    """The ResourceClaims of a pod, read from the API server for its Bind."""

    devices: frozenset[DeviceKey] = frozenset()
    """The allocated devices."""
    with_cpus: Sequence[ResourceClaimRecord] | None = None
    """The claims for CPUs; None where the agent sets the cpusets."""


class ResourceClaims:
    """Places pods beside their devices, and hands CPUs over to dra-driver-cpu."""

    def __init__(
        self,
        cluster: SchedulerClient,
        cache: NodeCache,
        pending: PendingPods,
        now: Callable[[], datetime],
    ) -> None:
        """`now` dates the CPUs that are handed over."""
        self._cluster = cluster
        self._cache = cache
        self._pending = pending
        self._now = now
        self._answers = RememberedAnswers()
        self._known: dict[tuple[object, ...], dict[NodeName, tuple[_Places, str]]] = {}
        """By request and node: the places of devices, and the reason why no room is beside them."""

    def node_changed(self, node: NodeName) -> None:
        """Forget the answers about room beside the devices of a node."""
        for known in self._known.values():
            known.pop(node, None)

    @staticmethod
    def may_have_devices(pod: PodRecord | None, requested: PendingRequest) -> bool:
        """Whether kube-scheduler allocates devices to a pod, as far as that is known."""
        return bool(requested.extended) or (pod is not None and bool(pod.resource_claims))

    # Filter.

    async def examine(
        self, pod: PodRecord, requested: PendingRequest, pending: PendingPod, names: Collection[NodeName]
    ) -> NodesWithDevices:
        """Check the nodes of a Filter call; other pods may have their turn meanwhile."""
        request = requested.pod_request.request
        refused = self._without_cpus(pod, request, names) | self._refused_binds(pending, names)
        if request.options.device_numa is DeviceNuma.OFF or not self.may_have_devices(pod, requested):
            return NodesWithDevices(refused)
        allocated, wanted = self._requested(pod, requested)
        if not (allocated or wanted):
            return NodesWithDevices(refused)
        if request.options.device_numa in _STRICT:
            refused = await self._far(pod, request, names, allocated, wanted) | refused
        left = [node for node in names if node not in refused]
        return NodesWithDevices(refused, await self._beside_free(request, left, allocated, wanted))

    def _refused_binds(self, pending: PendingPod, names: Collection[NodeName]) -> dict[NodeName, str]:
        refused_binds = pending.refused_binds
        for node, (version, _) in list(refused_binds.items()):
            if version != self._ledger_version(node):
                del refused_binds[node]
        return {node: why for node, (_, why) in refused_binds.items() if node in names}

    def _requested(self, pod: PodRecord, requested: PendingRequest) -> tuple[set[DeviceKey], Counter[str]]:
        """Return the devices of a pod, and by driver the number of devices that it will get."""
        devices = self._cache.dra
        allocated, wanted = set[DeviceKey](), Counter(devices.drivers_of(requested.extended))
        for name in pod.resource_claims:
            claim = devices.claims.get((pod.namespace, name))
            if claim is None:
                continue
            allocated.update(claim.allocated or ())
            for one in claim.requests if claim.allocated is None else ():
                wanted[devices.driver_of(one)] += one.count
        del wanted[""]  # the driver is not certain
        return allocated, wanted

    async def _far(
        self,
        pod: PodRecord,
        request: Request,
        names: Collection[NodeName],
        allocated: set[DeviceKey],
        wanted: Counter[str],
    ) -> dict[NodeName, str]:
        """Return the nodes without room beside the devices, each with the reason."""
        refused: dict[NodeName, str] = {}
        turns, drivers, known = Turns(), sorted(wanted), self._known_of(request)
        for node in names:
            await turns.spend(_DEVICE_STEPS)
            machine = self._cache.machine(node)
            if isinstance(machine, Unusable):
                continue
            topology, report = machine.topology, self._report(node)
            fixed = self._cache.dra.numa_nodes(node, topology, allocated, report)
            free = [self._cache.dra.free_numa_nodes(node, topology, driver, report) for driver in drivers]
            places: _Places = (fixed, tuple(zip(drivers, free, strict=True)))
            answer = known.get(node)
            if answer is None or answer[0] != places:
                await turns.spend(_NODE_STEPS)
                answer = (places, self._why_far(node, pod, request, fixed, dict(places[1])))
                if self._pending.hold_of(pod.uid, node) is None:
                    known[node] = answer
            if answer[1]:
                refused[node] = answer[1]
        return refused

    def _known_of(self, request: Request) -> dict[NodeName, tuple[_Places, str]]:
        known = self._known.setdefault(request.key, {})
        if len(self._known) > _MOST_KEPT:
            del self._known[next(iter(self._known))]
        return known

    def _why_far(
        self,
        node: NodeName,
        pod: PodRecord,
        request: Request,
        fixed: frozenset[NumaId],
        free: Mapping[str, frozenset[NumaId | None]],
    ) -> str:
        """Return the reason why a pod has no room beside any choice of devices on a node; empty if it has.

        `fixed` are the NUMA nodes of its devices, and `free` the NUMA nodes of free devices by driver.
        """
        snapshot = self._pending.snapshot(node, but=pod.uid)
        if not isinstance(snapshot, NodeSnapshot):
            return ""
        topology = snapshot.machine.topology
        choices = [(f"a free device of {driver}", numa_nodes) for driver, numa_nodes in free.items()]
        for what, numa_nodes in [("its devices", fixed), *choices]:
            known = sorted(one for one in numa_nodes if one is not None)
            if None in numa_nodes or not known:
                continue
            each = [fixed] if numa_nodes is fixed else [fixed | {one} for one in known]
            requests = [replace(request, device_nodes=request.device_nodes | one) for one in each]
            if any(may_fit(topology, snapshot.free, one) for one in requests):
                continue
            answers = [self._answers.of(snapshot, one) for one in requests]
            refusals = [answer for answer in answers if isinstance(answer, Refusal)]
            if len(refusals) == len(answers):
                return f"no room beside {what}: {min(refusals, key=lambda one: one.missing).message}"
        return ""

    async def _beside_free(
        self,
        request: Request,
        names: Collection[NodeName],
        allocated: set[DeviceKey],
        wanted: Counter[str],
    ) -> dict[Request, list[NodeName]]:
        """Group nodes by the request beside the devices of the pod and the first free ones."""
        groups: dict[frozenset[NumaId], list[NodeName]] = {}
        turns = Turns()
        for node in names:
            await turns.spend(_DEVICE_STEPS)
            numa_nodes, machine = frozenset[NumaId](), self._cache.machine(node)
            if not isinstance(machine, Unusable):
                devices, report, topology = self._cache.dra, self._report(node), machine.topology
                numa_nodes = devices.numa_nodes(node, topology, allocated, report)
                numa_nodes |= devices.first_free(node, topology, wanted, report)
            groups.setdefault(numa_nodes, []).append(node)
        if not any(groups):
            return {}
        return {_beside(request, numa_nodes): nodes for numa_nodes, nodes in groups.items()}

    def _without_cpus(
        self, pod: PodRecord, request: Request, names: Collection[NodeName]
    ) -> dict[NodeName, str]:
        """Return the nodes that the resource claims for CPUs exclude, each with the reason.

        Bind alone knows the claims that the watch has not shown yet, and requests without a number of CPUs.
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

    # Bind.

    async def read(
        self, args: BindingArgs, requested: PendingRequest, enforcement: Enforcement
    ) -> ReadClaims:
        """Read the resource claims of a pod from the API server, where they matter on the node.

        Raises Unavailable if the pod must be beside its devices and the ResourceSlices are not read yet.
        """
        device_numa = requested.pod_request.request.options.device_numa
        pod, is_dra = self._cache.pods.get(args.uid), enforcement is Enforcement.DRA
        is_beside = device_numa is not DeviceNuma.OFF and self.may_have_devices(pod, requested)
        if is_beside and not self._cache.dra.slices.has_synced:
            if device_numa in _STRICT:
                raise Unavailable("kvplace has not read the ResourceSlices yet; it will in a moment")
            is_beside = False
        if not (is_dra or is_beside):
            return ReadClaims()
        live = await self._cluster.read_pod(args.namespace, args.name)
        names = [name for name in live.resource_claims if name] if live is not None else []
        reads = (self._cluster.read_resource_claim(args.namespace, name) for name in names[:_MOST_CLAIMS])
        claims = [claim for claim in await together(*reads) if claim is not None]
        devices = {key for claim in claims for key in claim.allocated or ()} if is_beside else ()
        return ReadClaims(frozenset(devices), [one for one in claims if has_cpus(one)] if is_dra else None)

    def beside(self, node: NodeName, request: Request, topology: Topology, claims: ReadClaims) -> Request:
        """Return the request with the NUMA nodes of the devices that are allocated to the pod on a node."""
        if not claims.devices:
            return request
        return _beside(
            request, self._cache.dra.numa_nodes(node, topology, claims.devices, self._report(node))
        )

    def bind_refused(self, args: BindingArgs, pending: PendingPod, why: str) -> None:
        """Remember that a pod with devices was refused a node."""
        version = self._ledger_version(args.node)
        pending.refused_binds[args.node] = version, why.removeprefix(f"node {args.node}: ")

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

    def _ledger_version(self, node: NodeName) -> str:
        record = self._cache.ledgers.current(node)
        return record.resource_version if record is not None else ""

    def _report(self, node: NodeName) -> DeviceReport | None:
        described = self._cache.topologies.get(node)
        return described.devices if described is not None else None


def _beside(request: Request, numa_nodes: frozenset[NumaId]) -> Request:
    return replace(request, device_nodes=request.device_nodes | numa_nodes)


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
    """Return the problem of a pod that needs one resource claim with CPUs; empty if it has just one."""
    if not claims:
        return _WITHOUT_CLAIM
    if len(claims) > 1:
        names = ", ".join(sorted(name_of(claim) for claim in claims))
        return f"{names} all have CPUs: request the CPUs of a pod in one ResourceClaim"
    return ""


def _wrong_number(claim: ResourceClaimRecord, count: int, owned: int | None) -> str:
    """Return the problem of a resource claim with `count` CPUs; empty if the pod owns as many.

    `owned` is None if it is not certain.
    """
    if owned in (None, count):
        return ""
    return (
        f"{name_of(claim)} has {counted(count, 'CPU')}, and the pod owns {owned}: "
        f"set {CAPACITY} of its request to {owned}"
    )
