"""The demo: many VMs from creation to rewritten domain, by the code that runs in a cluster, and its report.

The user, KubeVirt, kube-scheduler and the kubelet are simulated here, each in a few lines. Admission,
extender, ledgers and hook are the real code, on a cluster in memory that follows the API server's rules.
As kube-scheduler does, the demo decides about one pod after the other and binds them in the background.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvplace.admission.objects import AdmissionSettings
from kvplace.admission.pod import admit_pod
from kvplace.admission.vmi import admit_vmi, review_vm
from kvplace.core.drawing.core_map import CoreMap, draw
from kvplace.core.drawing.core_map_json import core_map_document
from kvplace.core.errors import KvplaceError
from kvplace.core.ledger import Ledger
from kvplace.core.node_topology import API_VERSION
from kvplace.core.placement import Placement
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.core.vm_stages import Percentiles
from kvplace.core.well_known_names import PLACEMENT, REQUEST
from kvplace.domainxml import rewrite
from kvplace.domainxml.document import parse
from kvplace.hook.pod import placement_of_pod
from kvplace.hook.process import PodEnvironment
from kvplace.kube.events import EventRecorder
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.machines.server_types import SERVER_TYPES, read_machine
from kvplace.nodes.node_cache import NodeCache, running_node_cache
from kvplace.scheduler.extender import Extender
from kvplace.scheduler.extender_protocol import FilterResult, read_binding_args, read_extender_args
from kvplace.simulate.demo_vms import demo_vms, domain_xml, launcher_pod, read_templates, vmi_of_vm

KIND = "DemoReport"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """How large the demo is; equal settings give equal placements."""

    vms: int = 500
    nodes: int = 24
    seed: int = 1


@dataclass(frozen=True, slots=True)
class PlacedVm:
    """A VM that was bound, pinned or (with `on-failure: float`) unpinned."""

    name: str
    node: NodeName
    placement: Placement
    seconds: float
    """From the VM's creation to its rewritten domain."""
    deciding_seconds: float
    """The part of filter and prioritize, which choose its node and cores."""
    domain_before: bytes
    domain_after: bytes


@dataclass(frozen=True, slots=True)
class DemoRefusal:
    """A refused VM: the component that refused it, and the message for its user."""

    name: str
    by: str
    reason: str


@dataclass
class DemoReport:
    """The VMs of a demo."""

    settings: DemoSettings
    machines: Mapping[NodeName, Topology]
    """By the name of the node."""
    placed: list[PlacedVm] = field(default_factory=list)
    refused: list[DemoRefusal] = field(default_factory=list)
    ledgers: Mapping[NodeName, Ledger] = field(default_factory=dict)
    seconds: float = 0.0

    def order_by(self, names: Sequence[str]) -> None:
        """Put the VMs in this order of their names, not in the order of their binds."""
        place = {name: number for number, name in enumerate(names)}
        self.placed.sort(key=lambda vm: place[vm.name])
        self.refused.sort(key=lambda vm: place[vm.name])

    @property
    def done(self) -> int:
        """How many VMs were placed or refused."""
        return len(self.placed) + len(self.refused)

    @property
    def pinned(self) -> list[PlacedVm]:
        """The placed VMs that do not run unpinned."""
        return [vm for vm in self.placed if not vm.placement.floats]

    @property
    def numa_splits(self) -> Mapping[int, int]:
        """How many pinned VMs have their CPUs on one, two and more NUMA nodes."""
        return self._spread(lambda topology, cpus: len(topology.nodes_of(cpus)))

    @property
    def socket_splits(self) -> Mapping[int, int]:
        """How many pinned VMs have their CPUs on one, two and more sockets."""
        return self._spread(lambda topology, cpus: len(topology.packages_of(cpus)))

    @property
    def owned_cpus(self) -> int:
        """CPUs that have an owner, counted from the placements of the pods, not from the ledgers."""
        return sum(vm.placement.owned.bit_count() for vm in self.placed)

    @property
    def cpus_owned_twice(self) -> int:
        """CPUs that two pods own, or one pod and the host; anything but 0 is a bug."""
        used: dict[NodeName, CpuMask] = {node: topology.reserved for node, topology in self.machines.items()}
        twice = 0
        for vm in self.placed:
            twice += (used[vm.node] & vm.placement.owned).bit_count()
            used[vm.node] |= vm.placement.owned
        return twice

    @property
    def allocatable_cpus(self) -> int:
        """CPUs of all machines that are not reserved."""
        return sum(topology.allocatable.bit_count() for topology in self.machines.values())

    def core_map(self) -> CoreMap:
        """Draw the machine with several NUMA nodes that has most owners."""
        node = max(
            self.machines,
            key=lambda name: (
                len(self.machines[name].numa_nodes) > 1,
                len(set(self.ledgers[name].owners.values())),
                name,
            ),
        )
        ledger = self.ledgers[node]
        given = {vm.name: vm.placement for vm in self.pinned}
        placements = {uid: given[claim.vmi] for uid, claim in ledger.claims.items() if claim.vmi in given}
        return draw(node, self.machines[node], ledger, placements=placements)

    def example(self, node: str) -> PlacedVm | None:
        """Pick a VM with a domain that shows much: one that owns CPUs, if possible on that node."""
        return max(
            self.pinned,
            key=lambda vm: (vm.name.startswith("network-function"), vm.node == node, vm.placement.owned != 0),
            default=None,
        )

    def _spread(self, count: Callable[[Topology, CpuMask], int]) -> Mapping[int, int]:
        spread = Counter(count(self.machines[vm.node], vm.placement.cpus) for vm in self.pinned)
        return dict(sorted(spread.items()))


def similar_refusals(report: DemoReport) -> list[list[DemoRefusal]]:
    """Group refusals that differ in their numbers only, the largest group first."""
    groups: dict[tuple[str, str], list[DemoRefusal]] = {}
    for vm in report.refused:
        first = vm.reason.replace(vm.name, "").partition(", best ")[0]
        groups.setdefault((vm.by, re.sub(r"\d+", "0", first)), []).append(vm)
    return sorted(groups.values(), key=lambda vms: (-len(vms), vms[0].name))


def domain_diff(vm: PlacedVm) -> list[str]:
    """Give the changes to a domain as a unified diff without newlines.

    An empty element can be written in two ways; that alone is not a change.
    """
    return list(
        difflib.unified_diff(
            parse(vm.domain_before).to_bytes().decode().splitlines(),
            vm.domain_after.decode().splitlines(),
            "domain from virt-launcher",
            f"domain of {vm.name} on {vm.node}",
            n=2,
            lineterm="",
        )
    )


def demo_document(report: DemoReport) -> dict[str, Any]:
    """Write a report as JSON; everything but the seconds is the same for equal settings."""
    drawing = report.core_map()
    example = report.example(drawing.name)
    whole = Percentiles.of([vm.seconds for vm in report.placed])
    deciding = Percentiles.of([vm.deciding_seconds for vm in report.placed])
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "settings": {
            "vms": report.settings.vms,
            "nodes": report.settings.nodes,
            "seed": report.settings.seed,
        },
        **({"interrupted": "not all VMs were tried"} if report.done < report.settings.vms else {}),
        "placed": len(report.placed),
        "pinned": len(report.pinned),
        "refused": [
            {"by": vms[0].by, "count": len(vms), "reason": vms[0].reason, "vms": [vm.name for vm in vms]}
            for vms in similar_refusals(report)
        ],
        "vmsByNumaNodes": {str(nodes): count for nodes, count in report.numa_splits.items()},
        "vmsBySockets": {str(sockets): count for sockets, count in report.socket_splits.items()},
        "cpus": {
            "allocatable": report.allocatable_cpus,
            "owned": report.owned_cpus,
            "ownedTwice": report.cpus_owned_twice,
        },
        "seconds": {
            "all": report.seconds,
            "perVm": {"p50": whole.p50, "p95": whole.p95, "max": whole.max},
            "deciding": {"p50": deciding.p50, "p95": deciding.p95, "max": deciding.max},
        },
        "map": core_map_document(drawing),
        "domain": None if example is None else _domain_document(example),
        "vms": [_vm_document(report, vm) for vm in report.placed],
    }


def _vm_document(report: DemoReport, vm: PlacedVm) -> dict[str, Any]:
    return {
        "name": vm.name,
        "node": vm.node,
        "vcpus": list(vm.placement.vcpus),
        "numaNodes": list(report.machines[vm.node].nodes_of(vm.placement.cpus)),
    }


def _domain_document(vm: PlacedVm) -> dict[str, Any]:
    return {
        "vm": vm.name,
        "node": vm.node,
        "before": vm.domain_before.decode(),
        "after": vm.domain_after.decode(),
    }


NAMESPACE = "default"
_UIDS = uuid.UUID("6b766c61-6365-5000-8000-000000000000")


async def run_demo(
    settings: DemoSettings, goes_on: Callable[[DemoReport], bool] = lambda report: True
) -> DemoReport:
    """Create the VMs one after the other; asks after each whether it `goes_on`, and else creates no more."""
    started = time.perf_counter()
    cluster = MemoryCluster()
    machines = _machines(settings.nodes)
    for name, topology in machines.items():
        cluster.create_node(name, topology=topology)
    report = DemoReport(settings, machines)
    vms = demo_vms(read_templates(), settings.vms, settings.seed)
    try:
        async with running_node_cache(cluster) as cache:
            with tempfile.TemporaryDirectory(prefix="kvplace-demo-") as folder:
                lifecycle = _VmLifecycle(cluster, cache, report, Path(folder))
                async with asyncio.TaskGroup() as binds:
                    for vm in vms:
                        bind = await lifecycle.decide(vm)
                        if bind is not None:
                            binds.create_task(bind)
                        if not goes_on(report):
                            break
                await lifecycle.events.finish()
            report.ledgers = {name: cache.ledger(name) for name in machines}
    finally:
        await cluster.close()
    for ledger in report.ledgers.values():
        ledger.check()
    report.order_by([vm["metadata"]["name"] for vm in vms])
    report.seconds = time.perf_counter() - started
    return report


def _machines(count: int) -> dict[NodeName, Topology]:
    """Give each node a server type in turn."""
    types = [read_machine(server.name) for server in SERVER_TYPES]
    width = max(2, len(str(count)))
    return {NodeName(f"worker-{number + 1:0{width}d}"): types[number % len(types)] for number in range(count)}


class _VmLifecycle:
    """Takes VMs from their creation to their domains."""

    def __init__(self, cluster: MemoryCluster, cache: NodeCache, report: DemoReport, folder: Path) -> None:
        self.events = EventRecorder(cluster)
        self.extender = Extender(cluster, cache, self.events)
        self._cluster = cluster
        self._cache = cache
        self._report = report
        self._folder = folder
        self._admission = AdmissionSettings(sidecar_image="kvplace-hook")

    async def decide(self, vm: Mapping[str, Any]) -> Coroutine[Any, Any, None] | None:
        """Take one VM to the choice of its node; returns its bind, None if it was refused."""
        name = vm["metadata"]["name"]
        created = time.perf_counter()
        try:
            vmi, pod = self._admitted(vm)
        except KvplaceError as error:
            self._refused(name, "admission", str(error))
            return None
        self._cluster.create_pod(
            pod["metadata"]["name"],
            namespace=NAMESPACE,
            uid=pod["metadata"]["uid"],
            request=pod["metadata"]["annotations"][REQUEST],
            vmi=name,
            annotations=pod["metadata"]["annotations"],
        )
        before = time.perf_counter()
        node = await self._chosen(name, pod)
        if node is None:
            return None
        deciding = time.perf_counter() - before
        return self._bind(name, vmi, pod, node, created=created, deciding=deciding)

    async def _bind(
        self,
        name: str,
        vmi: Mapping[str, Any],
        pod: Mapping[str, Any],
        node: NodeName,
        *,
        created: float,
        deciding: float,
    ) -> None:
        """Act as kube-scheduler's binding cycle; then the kubelet and the hook take the VM to its domain."""
        metadata = pod["metadata"]
        call = {
            "PodName": metadata["name"],
            "PodNamespace": metadata["namespace"],
            "PodUID": metadata["uid"],
            "Node": node,
        }
        bound = await self.extender.bind(read_binding_args(msgspec.json.encode(call)))
        if bound.error:
            self._refused(name, "bind", bound.error)
            return
        placement = self._seen_by_hook(metadata["name"], metadata["uid"], node)
        domain = domain_xml(vmi)
        after = domain if placement.floats else rewrite(domain, placement)
        seconds = time.perf_counter() - created
        self._report.placed.append(PlacedVm(name, node, placement, seconds, deciding, domain, after))

    def _admitted(self, vm: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Act as KubeVirt's controllers and the API server, up to the stored pod."""
        largest = self._cache.largest_node
        review_vm(vm, namespace=NAMESPACE, largest_node=largest)
        made = vmi_of_vm(vm, namespace=NAMESPACE)
        admitted = admit_vmi(made, namespace=NAMESPACE, settings=self._admission, largest_node=largest)
        vmi = _stored(admitted.object, f"vmi/{made['metadata']['name']}")
        self._cluster.put_vmi(NAMESPACE, vmi["metadata"]["name"], vmi)
        pod = launcher_pod(vmi)
        author = self._admission.kubevirt_controller
        admitted = admit_pod(pod, namespace=NAMESPACE, settings=self._admission, author=author, vmi=vmi)
        stored = _stored(admitted.object, f"pod/{vmi['metadata']['name']}")
        stored["metadata"]["name"] = (
            f"virt-launcher-{vmi['metadata']['name']}-{stored['metadata']['uid'][-5:]}"
        )
        return vmi, stored

    async def _chosen(self, name: str, pod: Mapping[str, Any]) -> NodeName | None:
        """Act as kube-scheduler's scheduling cycle: filter, and take the best score."""
        body = msgspec.json.encode({"Pod": pod, "NodeNames": list(self._report.machines)})
        filtered = await self.extender.filter(read_extender_args(body))
        if filtered.error or not filtered.names:
            self._refused(name, "filter", filtered.error or _failed_scheduling(filtered))
            return None
        body = msgspec.json.encode({"Pod": pod, "NodeNames": filtered.names})
        scores = await self.extender.prioritize(read_extender_args(body))
        return max(scores, key=lambda score: score.score).host

    def _seen_by_hook(self, pod: str, uid: PodUid, node: NodeName) -> Placement:
        """Act as the kubelet and the hook: write the downward API files, and read the placement from them."""
        annotations = self._cluster.pod_annotations(NAMESPACE, pod)
        (self._folder / "placement").write_text(annotations.get(PLACEMENT, ""), encoding="utf-8")
        (self._folder / "uid").write_text(uid, encoding="utf-8")
        around = PodEnvironment.of({"KVPLACE_POD_FOLDER": str(self._folder), "NODE_NAME": node})
        return placement_of_pod(around).placement

    def _refused(self, name: str, by: str, reason: str) -> None:
        self._report.refused.append(DemoRefusal(name, by, reason))


def _stored(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Copy an object as the API server stores it, with a UID."""
    stored: dict[str, Any] = json.loads(json.dumps(document))
    stored["metadata"]["uid"] = str(uuid.uuid5(_UIDS, name))
    return stored


def _failed_scheduling(filtered: FilterResult) -> str:
    """The message that kube-scheduler writes into the pod's condition and event."""
    counts = Counter(filtered.unresolvable.values())
    reasons = ", ".join(
        f"{count} {text}" for text, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    )
    return f"0/{sum(counts.values())} nodes are available: {reasons}."
