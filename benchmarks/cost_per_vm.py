"""What it costs to bring many VMs to their nodes, with kvplace and without, by process.

    python -m benchmarks.cost_per_vm [--nodes 50 1000 5000] [--vms 500] [--rounds 2]

Two clusters take turns. The first has a real kube-apiserver with KubeVirt's own admission and
virt-controller, and kube-scheduler. The second has in addition kvplace, installed from its manifests (one
replica, webhooks and policies included, and its kube-scheduler beside the cluster's own). Nodes are Node
objects of four server types. Sixteen clients send all VirtualMachineInstances at once; in the second cluster
they ask for cores (`cpu-set: one-numa`). Time starts with the first one sent and ends when a watch shows the
last pod bound. CPU is what the kernel counts for each process from then until four seconds after the last
binding, so that late work such as events is part of it. Tables have medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks._api_requests import Call, ask_all, counted_requests, requests_since
from benchmarks._bindings import Bindings
from benchmarks._processes import cpu_of_all, used_since
from benchmarks._tables import table
from benchmarks.bound_per_second import machines
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.programs import KUBEVIRT
from harness.go_build import built
from harness.kvplace_cluster.installation import Installation
from harness.kvplace_cluster.machines import node_shape, node_topology
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from kvplace.core.topology import Topology

AFTERWARDS_S = 4.0
_PATIENCE_S = 120.0
PROCESSES = (
    "kube-apiserver",
    "etcd",
    "virt-controller",
    "KubeVirt's admission",
    "kube-scheduler",
    "kvplace",
)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round came to."""

    seconds: float
    """From the first VMI sent to the last pod bound."""
    cpu_ms: Mapping[str, float]
    """CPU milliseconds per VM by process."""
    requests: Mapping[str, float]
    """Writes that the API server answered, per VM."""

    @property
    def sum_ms(self) -> float:
        """CPU milliseconds per VM of all processes."""
        return sum(self.cpu_ms.values())


class Cluster:
    """One of the two clusters."""

    def __init__(self, plane: ControlPlane, virt: KubeVirt, installation: Installation | None) -> None:
        self._plane = plane
        self._virt = virt
        self._installation = installation
        self._rounds = 0

    def add_nodes(self, added: Mapping[str, Topology], first: int) -> None:
        """Create nodes, and with kvplace what their agents would publish; `first` numbers their addresses."""
        calls: list[Call] = []
        for number, (name, machine) in enumerate(added.items(), first):
            node = node_shape(name, machine).manifest(
                f"172.{16 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}"
            )
            calls.append(("POST", "/api/v1/nodes", node))
            if self._installation is not None:
                described = node_topology(name, machine)
                calls.append(("POST", "/apis/kvplace.io/v1alpha1/nodetopologies", described))
        asyncio.run(ask_all(self._plane, calls))

    def measure(self, count: int) -> Round:
        """Create VMs, follow them until all are bound, and remove them."""
        self._rounds += 1
        namespace = self._plane.create_namespace(f"vms-{self._rounds}")
        asking = {"cpu-set": "one-numa"} if self._installation is not None else {}
        path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMIS}"
        names = [f"vm-{number:04}" for number in range(count)]
        vmis = [vmi_manifest(name, cores=4, annotations=asking) for name in names]
        calls: list[Call] = [("POST", path, {"apiVersion": "kubevirt.io/v1", **vmi}) for vmi in vmis]
        before = counted_requests(self._plane)
        with Bindings(self._plane, namespace, count) as bindings:
            at_first, began = self._cpu(), time.monotonic()
            asyncio.run(ask_all(self._plane, calls))
            seconds = bindings.wait()[-1] - began
        time.sleep(AFTERWARDS_S)
        used = used_since(at_first, self._cpu())
        requests = requests_since(before, counted_requests(self._plane))
        self._remove(namespace)
        return Round(
            seconds,
            {name: 1000 * spent / count for name, spent in used.items()},
            {name: number / count for name, number in requests.items()},
        )

    def _cpu(self) -> dict[str, float]:
        used: dict[str, float] = {}
        servers = [*self._plane.servers, *self._virt.servers]
        if self._installation is not None:
            servers += [replica.process for replica in self._installation.replicas]
        for server in servers:
            if server.is_running:
                name = process_name(server.name)
                used[name] = used.get(name, 0.0) + cpu_of_all({name: server.pid})[name]
        return used

    def _remove(self, namespace: str) -> None:
        vmis = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMIS}"
        self._plane.request("DELETE", vmis)
        deadline = time.monotonic() + _PATIENCE_S
        while self._plane.request("GET", f"{vmis}?limit=1")["items"] or self._is_claimed():
            # There is no kubelet here that would end the pods.
            self._plane.request("DELETE", f"/api/v1/namespaces/{namespace}/pods?gracePeriodSeconds=0")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the VMs of {namespace} are still there after {_PATIENCE_S:.0f} s")
            time.sleep(0.5)

    def _is_claimed(self) -> bool:
        if self._installation is None:
            return False
        ledgers = self._plane.request("GET", "/apis/kvplace.io/v1alpha1/nodeledgers")["items"]
        return any(ledger["spec"]["claims"] for ledger in ledgers)


def process_name(server: str) -> str:
    """Name the process as the table does: its two schedulers, and the replicas, count together."""
    for begins, name in (
        ("kvplace-serve", "kvplace"),
        ("kube-scheduler", "kube-scheduler"),
        ("kubevirt-admission", "KubeVirt's admission"),
    ):
        if server.startswith(begins):
            return name
    return server


@contextlib.contextmanager
def running_clusters() -> Iterator[dict[str, Cluster]]:
    """Start a cluster without and one with kvplace."""
    programs = built(KUBEVIRT)
    with (
        ControlPlane() as bare,
        KubeVirt(bare, programs) as bare_virt,
        ControlPlane() as plane,
        KubeVirt(plane, programs) as virt,
        Installation(plane) as installation,
    ):
        bare.add_scheduler()
        plane.add_scheduler()
        installation.add_scheduler(installation.replicas[0])
        yield {"without": Cluster(bare, bare_virt, None), "with kvplace": Cluster(plane, virt, installation)}


def report(nodes: int, vms: int, found: Mapping[str, list[Round]]) -> None:
    """Print the tables of one size of the cluster."""
    rounds = len(found["without"])
    print(f"{nodes} nodes, {vms} VMs at once, medians of {rounds} {'rounds' if rounds > 1 else 'round'}\n")
    rows = []
    for name in PROCESSES:
        without, with_it = (_median(found, side, name) for side in found)
        rows.append([name, f"{without:.1f}", f"{with_it:.1f}", f"{with_it - without:+.1f}"])
    sums = [statistics.median(one.sum_ms for one in one_side) for one_side in found.values()]
    seconds = [statistics.median(one.seconds for one in one_side) for one_side in found.values()]
    for name, (without, with_it) in {
        "all, CPU-ms per VM": sums,
        "seconds to the last binding": seconds,
    }.items():
        rows.append([name, f"{without:.1f}", f"{with_it:.1f}", f"{with_it / without:.2f} times"])
    print(table(["", *found, ""], rows))
    print()
    kinds = sorted({kind for one_side in found.values() for one in one_side for kind in one.requests})
    rows = [
        [
            kind,
            *(
                f"{statistics.median(one.requests.get(kind, 0.0) for one in one_side):.2f}"
                for one_side in found.values()
            ),
        ]
        for kind in kinds
    ]
    print(table(["requests per VM", *found], rows))
    print()


def _median(found: Mapping[str, list[Round]], side: str, process: str) -> float:
    return statistics.median(one.cpu_ms.get(process, 0.0) for one in found[side])


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[50, 1000, 5000], help="sizes of the cluster")
    parser.add_argument("--vms", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    with running_clusters() as clusters:
        present = 0
        for nodes in sorted(given.nodes):
            added = dict(list(machines(nodes).items())[present:])
            for cluster in clusters.values():
                cluster.add_nodes(added, present)
                if not present:
                    cluster.measure(2)  # the first ones meet cold caches everywhere
            present = nodes
            found: dict[str, list[Round]] = {name: [] for name in clusters}
            for _ in range(given.rounds):
                for name, cluster in clusters.items():
                    found[name].append(cluster.measure(given.vms))
                    spent = found[name][-1].sum_ms
                    print(f"{nodes} nodes, {name}: {spent:.1f} CPU-ms per VM", file=sys.stderr, flush=True)
            report(nodes, given.vms, found)


if __name__ == "__main__":
    main()
