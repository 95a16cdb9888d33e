"""CPU time of `serve` and of the agent for VMs with devices.

    python -m benchmarks.device_reads [--nodes 100 1000] [--vms 60]

*Filter* and *Bind* are those of `serve`, in one process with a cluster in memory: requests to the API server
cost nothing there. Half of the CPUs of each node are owned. Each node has 8 virtual functions (VFs) of a
device plugin and 8 VFs in a ResourceSlice, half of them on its first NUMA node and half on its last. The VMs
request 4 CPUs on one NUMA node. The kinds of VMs take turns, and each VM ends before the next one begins; the
first three VMs of a kind are not counted. Between Filter and Bind the first VF of the node is allocated to
the ResourceClaim. Bind reads pod and ResourceClaim of such a VM: *requests* is the number of these reads.
Milliseconds of CPU, medians.

*podresources* is one read of the agent with all that follows from it, up to the comparison with what was
published. The kubelet is played by another thread, and not counted. It reports 100 pods with one VF each, of
128 VFs. Without changes the agent reads every ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._fillers import _occupied
from benchmarks._tables import table
from benchmarks.bound_per_second import machines
from harness.device_plugin import numa_nodes
from harness.grpc_server import GrpcServer
from kvplace.agent.devices import device_report
from kvplace.core.ledger import Claim, LedgerChange
from kvplace.core.node_devices import DeviceReport, NodeDevices, TopologyPolicy
from kvplace.core.protobuf import bytes_field
from kvplace.core.request import DeviceNuma, PinningOptions, Policy, Request, Scope
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import Bytes, NodeName, PodUid, ResourceName
from kvplace.core.topology import Topology
from kvplace.kube.events import EventRecorder
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.object_records import (
    DeviceClassRecord,
    DeviceRequest,
    PodRecord,
    ResourceClaimRecord,
    SliceDevice,
    SliceRecord,
)
from kvplace.kubelet.pod_resources import read_pod_resources
from kvplace.nodes.node_cache import NodeCache, running_node_cache
from kvplace.scheduler.extender import Extender
from kvplace.scheduler.extender_protocol import BindingArgs, ExtenderArgs

VF = ResourceName("intel.com/vf")
DRIVER = "vf.example.com"
VFS = 8
OPTIONS = PinningOptions(scope=Scope.ONE_NUMA)
REQUIRED = replace(OPTIONS, device_numa=DeviceNuma.REQUIRED)
KINDS: Mapping[str, tuple[PinningOptions, int, bool]] = {
    "without devices": (OPTIONS, 0, False),
    "device plugin, preferred": (OPTIONS, 1, False),
    "device plugin, required": (REQUIRED, 1, False),
    "ResourceClaim, preferred": (OPTIONS, 0, True),
    "ResourceClaim, required": (REQUIRED, 0, True),
}
"""Options, devices of the plugin, and whether it has a ResourceClaim."""


class Counted(MemoryCluster):
    """A cluster that counts the requests for objects."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def put_devices(self, record: SliceRecord) -> None:
        """Publish the devices of a node, as a DRA driver does."""
        self._slices.put(record.name, record)

    def put_device_class(self, record: DeviceClassRecord) -> None:
        """Create a DeviceClass."""
        self._device_classes.put(record.name, record)

    def end_pod(self, name: str) -> None:
        """Delete a pod."""
        self._pods.remove(("default", name))

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        self.reads += 1
        return await super().read_pod(namespace, name)

    async def read_resource_claim(self, namespace: str, name: str) -> ResourceClaimRecord | None:
        self.reads += 1
        return await super().read_resource_claim(namespace, name)


async def filled(nodes: Mapping[str, Topology]) -> Counted:
    """Describe nodes with devices; half of the CPUs are owned."""
    cluster, chance = Counted(), random.Random(1)
    cluster.put_device_class(DeviceClassRecord("vf", DRIVER))
    for name, machine in nodes.items():
        numa_nodes = [machine.numa_nodes[0].id, machine.numa_nodes[-1].id]
        places = [numa_nodes[number * 2 // VFS] for number in range(VFS)]
        counts = NodeDevices.all_free([(VF, place, 1) for place in places], TopologyPolicy("best-effort"))
        cluster.create_node(name)
        cluster.put_topology(name, machine, by_agent=True, devices=DeviceReport(counts))
        devices = tuple(SliceDevice(f"vf{number}", place) for number, place in enumerate(places))
        cluster.put_devices(SliceRecord(name, DRIVER, name, 1, NodeName(name), devices))
        owned = _occupied(machine, 0.5, chance)
        uid = PodUid(f"running-{name}")
        claim = Claim(uid, uid, uid, "", Policy.EXCLUSIVE, owned, owned, {}, {}, "2026-01-01T00:00:00Z")
        ledger = await cluster.create_ledger(NodeName(name))
        await cluster.write_ledger(ledger, LedgerChange(claims=(claim,)))
    return cluster


class Scheduled:
    """VMs that come and go, and the CPU time of each."""

    def __init__(self, cluster: Counted, cache: NodeCache, nodes: list[NodeName]) -> None:
        self._cluster = cluster
        self._cache = cache
        self._extender = Extender(cluster, cache, EventRecorder(cluster))
        self._nodes = nodes
        self._number = 0

    async def describe(self) -> None:
        """Describe the nodes, as at the start of `serve`."""
        await self._extender.describe_nodes()

    async def one(self, kind: str) -> tuple[float, float, int]:
        """Bring a VM to its node and end it; returns CPU seconds of Filter and Bind, and the requests."""
        options, devices, has_claim = KINDS[kind]
        self._number += 1
        name = f"vm-{self._number}"
        request = Request(4, options, memory=Bytes(4 << 30), devices={VF: devices} if devices else {})
        if has_claim:
            self._cluster.put_resource_claim(ResourceClaimRecord("default", name, (DeviceRequest("vf"),)))
        pod = self._cluster.create_pod(
            name, request=write_request(PodRequest(request)), resource_claims=(name,) if has_claim else ()
        )
        await until(lambda: pod.uid in self._cache.pods.records)
        began = time.process_time()
        answer = await self._extender.filter(ExtenderArgs(pod, self._nodes))
        filtered = time.process_time() - began
        assert answer.names
        node = answer.names[0]
        if has_claim:
            keys = ((DRIVER, node, "vf0"),)
            allocated = ResourceClaimRecord("default", name, (DeviceRequest("vf"),), keys)
            self._cluster.put_resource_claim(allocated)
            await until(lambda: bool(self._known(name)))
        reads, began = self._cluster.reads, time.process_time()
        bound = await self._extender.bind(BindingArgs(name, "default", pod.uid, node))
        took = time.process_time() - began
        assert not bound.error, bound.error
        reads = self._cluster.reads - reads
        await self._end(name, pod.uid, node)
        return filtered, took, reads

    def _known(self, name: str) -> tuple[Any, ...]:
        known = self._cache.dra.claims.get(("default", name))
        return (known.allocated or ()) if known is not None else ()

    async def _end(self, name: str, uid: PodUid, node: NodeName) -> None:
        self._cluster.end_pod(name)
        freed = ResourceClaimRecord("default", name)
        if self._known(name):
            self._cluster.put_resource_claim(freed)
        await until(lambda: uid in self._cache.ledger(node).claims)
        record = self._cache.ledgers.current(node)
        assert record is not None
        await self._cluster.write_ledger(record, LedgerChange(releases=(uid,)))
        await until(
            lambda: (
                not (
                    uid in self._cache.pods.records
                    or self._known(name)
                    or uid in self._cache.ledger(node).claims
                )
            )
        )


async def until(holds: Callable[[], bool]) -> None:
    """Let the watches work until something is known."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def serve_rows(count: int, vms: int) -> list[list[str]]:
    """Measure Filter and Bind over so many nodes."""
    made = machines(count)
    cluster = await filled(made)
    took: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in KINDS}
    async with running_node_cache(cluster) as cache:
        scheduled = Scheduled(cluster, cache, list(map(NodeName, made)))
        await scheduled.describe()
        await until(lambda: cache.dra.slices.has_synced and cache.dra.classes.has_synced)
        for number in range(vms + 3):
            for kind, found in took.items():
                one = await scheduled.one(kind)
                if number >= 3:  # the first ones fill what is remembered
                    found.append(one)
    rows = []
    base = statistics.median(sum(one[:2]) for one in took["without devices"])
    for kind, found in took.items():
        filters, binds, reads = zip(*found, strict=True)
        both = statistics.median(sum(one[:2]) for one in found)
        rows.append(
            [
                f"{count} nodes, {kind}",
                f"{statistics.median(filters) * 1e3:.2f}",
                f"{statistics.median(binds) * 1e3:.2f}",
                f"{both * 1e3:.2f}",
                f"{both / base:.1f}",
                f"{statistics.median(reads):.0f}",
            ]
        )
    return rows


async def agent_row(reads: int) -> list[str]:
    """Measure one read of podresources by the agent."""
    vf, devices, pods, known = f"{VF}", b"", b"", []
    for number in range(128):
        place = numa_nodes([number // 64])
        device = bytes_field(1, vf) + bytes_field(2, f"0000:c1:{number // 8:02x}.{number % 8}")
        device += bytes_field(3, place)
        devices += bytes_field(1, device)
        if number < 100:
            container = bytes_field(1, "compute") + bytes_field(2, device)
            name = f"vm-{number}"
            pods += bytes_field(
                1, bytes_field(1, name) + bytes_field(2, "default") + bytes_field(3, container)
            )
            known.append(PodRecord("default", name, PodUid(name), NodeName("n1"), placement="{}"))
    took, before = [], None
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "kubelet.sock"
        lister = "/v1.PodResourcesLister"
        answers = {f"{lister}/List": lambda _: pods, f"{lister}/GetAllocatableResources": lambda _: devices}
        with GrpcServer(socket, answers):
            for _ in range(reads):
                began = time.thread_time()
                allocatable, listed = await read_pod_resources(socket)
                report = device_report(allocatable, listed, known, TopologyPolicy("best-effort"), {})
                is_same = report == before
                took.append(time.thread_time() - began)
                assert is_same == (before is not None)
                before = report
    assert before is not None
    assert len(before.pods) == 100
    return ["podresources", f"{statistics.median(took) * 1e3:.2f}"]


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--vms", type=int, default=60)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = [row for count in given.nodes for row in asyncio.run(serve_rows(count, given.vms))]
    print(table(["", "Filter", "Bind", "both", "ratio", "requests"], rows))
    print()
    print(table(["agent", "CPU-ms"], [asyncio.run(agent_row(50))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
