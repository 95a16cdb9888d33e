"""Many VMs from creation to rewritten domain, by the code that runs in a cluster, without a cluster.

The user, KubeVirt, kube-scheduler and the kubelet are simulated here, each in a few lines. Admission,
extender, ledgers and hook are the real ones, on a cluster in memory that follows the API server's rules.
As kube-scheduler does, the demo decides about one pod after the other and binds them in the background.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvplace.admission.pod import admit_pod
from kvplace.admission.review import AdmissionSettings
from kvplace.admission.vmi import admit_vmi, review_vm
from kvplace.core.errors import KvplaceError
from kvplace.core.placement import Placement
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACEMENT, REQUEST
from kvplace.domainxml import rewrite
from kvplace.hook.pod import placement_of_pod
from kvplace.hook.pod_environment import PodEnvironment
from kvplace.kube.events import EventRecorder
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.machines.server_types import SERVER_TYPES, read_machine
from kvplace.nodes.node_cache import NodeCache, running_node_cache
from kvplace.scheduler.extender import Extender
from kvplace.scheduler.extender_protocol import FilterResult, read_binding_args, read_extender_args
from kvplace.simulate.demo_report import DemoRefusal, DemoReport, DemoSettings, PlacedVm
from kvplace.simulate.virt_launcher import domain_xml, launcher_pod, vmi_of
from kvplace.simulate.vm_templates import demo_vms, read_templates

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
                        decided = await lifecycle.decide(vm)
                        if decided is not None:
                            binds.create_task(lifecycle.bind(decided))
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


@dataclass(frozen=True)
class _Decided:
    """A VM with a chosen node and a pod to bind."""

    name: str
    vmi: Mapping[str, Any]
    pod: Mapping[str, Any]
    node: NodeName
    created: float
    deciding_seconds: float


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

    async def decide(self, vm: Mapping[str, Any]) -> _Decided | None:
        """Take one VM to the choice of its node; None if it was refused."""
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
        return _Decided(name, vmi, pod, node, created, time.perf_counter() - before)

    async def bind(self, vm: _Decided) -> None:
        """Act as kube-scheduler's binding cycle; then the kubelet and the hook take the VM to its domain."""
        metadata = vm.pod["metadata"]
        call = {
            "PodName": metadata["name"],
            "PodNamespace": metadata["namespace"],
            "PodUID": metadata["uid"],
            "Node": vm.node,
        }
        bound = await self.extender.bind(read_binding_args(msgspec.json.encode(call)))
        if bound.error:
            self._refused(vm.name, "bind", bound.error)
            return
        placement = self._seen_by_hook(metadata["name"], metadata["uid"], vm.node)
        domain = domain_xml(vm.vmi)
        after = domain if placement.floats else rewrite(domain, placement)
        seconds = time.perf_counter() - vm.created
        self._report.placed.append(
            PlacedVm(vm.name, vm.node, placement, seconds, vm.deciding_seconds, domain, after)
        )

    def _admitted(self, vm: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Act as KubeVirt's controllers and the API server, up to the stored pod."""
        largest = self._cache.largest_node
        review_vm(vm, namespace=NAMESPACE, largest_node=largest)
        made = vmi_of(vm, namespace=NAMESPACE)
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
