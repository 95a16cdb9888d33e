"""Devices of Dynamic Resource Allocation in Filter and Bind: cores beside the devices of a pod.

kube-scheduler allocates devices between Filter and Bind and does not name them. So Filter refuses the nodes
where no free device has room beside it, and ranks the others as if the first free devices were allocated.
Bind reads the resource claims of the pod from the API server, and places beside their devices.

After a refused Bind the devices stay allocated, and kube-scheduler offers their node alone. It frees them
when Filter refuses that node. So Filter remembers the refusal until the ledger of the node changes.
Everything here only reads; `dra_enforcement` alone writes resource claims, of CPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

from kvplace.core.allocator.allocate import may_fit
from kvplace.core.errors import Unavailable
from kvplace.core.node_devices import DeviceReport
from kvplace.core.placement import Refusal
from kvplace.core.request import DeviceNuma, Request
from kvplace.core.scalars import NodeName, NumaId
from kvplace.core.topology import Topology
from kvplace.kube.concurrency import Turns, together
from kvplace.kube.object_records import DeviceKey, PodRecord, ResourceClaimRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeSnapshot, Unusable
from kvplace.scheduler.extender_protocol import BindingArgs
from kvplace.scheduler.pending_pods import AskingPod, PendingPods, PodReader
from kvplace.scheduler.ranking import RememberedAnswers

_MOST_CLAIMS = 64
"""Resource claims of one pod that are read; devices of others constrain nothing."""
_NODE_STEPS = 1_000
"""Steps of checking a node for a pod with devices."""
_DEVICE_STEPS = 50
"""Steps of finding the first free devices of a node."""
_MOST_KEPT = 32
"""Requests that the room beside devices is remembered for."""
_Places = tuple[frozenset[NumaId], tuple[tuple[str, frozenset[NumaId | None]], ...]]
"""The NUMA nodes of the devices that a pod has, and by driver those of free devices."""
_STRICT = (DeviceNuma.REQUIRED, DeviceNuma.SOCKET)


class DeviceReader(PodReader, Protocol):
    """The cluster calls of reading the devices of a pod."""

    async def read_resource_claim(self, namespace: str, name: str) -> ResourceClaimRecord | None:
        """Read a ResourceClaim as the API server has it now; None if there is none."""
        ...


class ClaimedDevices:
    """Answers for Filter and Bind where a pod may be, as far as its devices decide."""

    def __init__(self, cluster: DeviceReader, cache: NodeCache, pending: PendingPods) -> None:
        self._cluster = cluster
        self._cache = cache
        self._pending = pending
        self._answers = RememberedAnswers()
        self._known: dict[tuple[object, ...], dict[NodeName, tuple[_Places, str]]] = {}
        """By request and node: the places of devices, and why there is no room beside them."""

    @staticmethod
    def may_have(pod: PodRecord | None, asking: AskingPod) -> bool:
        """Whether kube-scheduler allocates devices to a pod, as far as that is known."""
        return bool(asking.extended) or (pod is not None and bool(pod.resource_claims))

    async def refusals(
        self, pod: PodRecord, asking: AskingPod, names: Collection[NodeName]
    ) -> dict[NodeName, str]:
        """Return the nodes that Filter refuses to a pod because of devices, and why."""
        refused, request = self._refused_binds(pod, names), asking.pod_request.request
        if request.options.device_numa not in _STRICT or not self.may_have(pod, asking):
            return refused
        allocated, wanted = self._requested(pod, asking)
        if not allocated and not wanted:
            return refused
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
                refused.setdefault(node, answer[1])
        return refused

    def node_changed(self, node: NodeName) -> None:
        """Forget which requests have room beside the devices of a node."""
        for known in self._known.values():
            known.pop(node, None)

    def _known_of(self, request: Request) -> dict[NodeName, tuple[_Places, str]]:
        known = self._known.setdefault(request.key, {})
        if len(self._known) > _MOST_KEPT:
            del self._known[next(iter(self._known))]
        return known

    async def requests(
        self, pod: PodRecord, asking: AskingPod, names: Collection[NodeName]
    ) -> dict[Request, list[NodeName]]:
        """Return the request of a pod beside the devices that it will probably get, and the nodes for each.

        Empty where no node has such devices on a known NUMA node.
        """
        request = asking.pod_request.request
        if request.options.device_numa is DeviceNuma.OFF or not self.may_have(pod, asking):
            return {}
        allocated, wanted = self._requested(pod, asking)
        groups: dict[frozenset[NumaId], list[NodeName]] = {}
        turns = Turns()
        for node in names if allocated or wanted else ():
            await turns.spend(_DEVICE_STEPS)
            numa_nodes, machine = frozenset[NumaId](), self._cache.machine(node)
            if not isinstance(machine, Unusable):
                devices, report, topology = self._cache.dra, self._report(node), machine.topology
                numa_nodes = devices.numa_nodes(node, topology, allocated, report)
                numa_nodes |= devices.first_free(node, topology, wanted, report)
            groups.setdefault(numa_nodes, []).append(node)
        if not any(groups):
            return {}
        return {
            replace(request, device_nodes=request.device_nodes | numa_nodes): nodes
            for numa_nodes, nodes in groups.items()
        }

    def bind_refused(self, args: BindingArgs, why: str) -> None:
        """Remember that a pod with devices was refused a node."""
        version = self._ledger_version(args.node)
        self._pending.bind_refused(args.uid, args.node, version, why.removeprefix(f"node {args.node}: "))

    async def beside(self, args: BindingArgs, asking: AskingPod, topology: Topology) -> Request:
        """Return the request of a pod with the NUMA nodes of the devices that are allocated to it on a node.

        Raises Unavailable if it must be beside its devices and they are not known yet.
        """
        request, devices = asking.pod_request.request, self._cache.dra
        pod = self._cache.pods.get(args.uid)
        if request.options.device_numa is DeviceNuma.OFF or not self.may_have(pod, asking):
            return request
        if not devices.slices.has_synced:
            if request.options.device_numa in _STRICT:
                raise Unavailable("kvplace has not read the ResourceSlices yet; it will in a moment")
            return request
        allocated = {key for claim in await self.claims(args) for key in claim.allocated or ()}
        numa_nodes = devices.numa_nodes(args.node, topology, allocated, self._report(args.node))
        return replace(request, device_nodes=request.device_nodes | numa_nodes)

    async def claims(self, args: BindingArgs) -> list[ResourceClaimRecord]:
        """Read the resource claims of a pod as the API server has them now."""
        live = await self._cluster.read_pod(args.namespace, args.name)
        names = [name for name in live.resource_claims if name] if live is not None else []
        reads = (self._cluster.read_resource_claim(args.namespace, name) for name in names[:_MOST_CLAIMS])
        return [claim for claim in await together(*reads) if claim is not None]

    def _requested(self, pod: PodRecord, asking: AskingPod) -> tuple[set[DeviceKey], Counter[str]]:
        """Return the devices that a pod has, and by driver how many more it will get."""
        devices = self._cache.dra
        allocated, wanted = set[DeviceKey](), Counter(devices.drivers_of(asking.extended))
        for name in pod.resource_claims:
            claim = devices.claims.get((pod.namespace, name))
            if claim is None:
                continue
            allocated.update(claim.allocated or ())
            for one in claim.requests if claim.allocated is None else ():
                wanted[devices.driver_of(one)] += one.count
        del wanted[""]  # which driver it will be is not certain
        return allocated, wanted

    def _refused_binds(self, pod: PodRecord, names: Collection[NodeName]) -> dict[NodeName, str]:
        refused_binds = self._pending.get(pod.uid).refused_binds
        for node, (version, _) in list(refused_binds.items()):
            if version != self._ledger_version(node):
                del refused_binds[node]
        return {node: why for node, (_, why) in refused_binds.items() if node in names}

    def _why_far(
        self,
        node: NodeName,
        pod: PodRecord,
        request: Request,
        fixed: frozenset[NumaId],
        free: Mapping[str, frozenset[NumaId | None]],
    ) -> str:
        """Return why a pod has no room beside any choice of its devices on a node; empty if it has.

        `fixed` are the NUMA nodes of the devices that it has, and `free` those of free devices by driver.
        """
        snapshot = self._cache.snapshot(node, self._pending.held_on(node, but=pod.uid))
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

    def _ledger_version(self, node: NodeName) -> str:
        record = self._cache.ledgers.current(node)
        return record.resource_version if record is not None else ""

    def _report(self, node: NodeName) -> DeviceReport | None:
        described = self._cache.topologies.get(node)
        return described.devices if described is not None else None
