"""Seconds from a VM's creation to its bound pod, for VMs that opted in and VMs that did not.

    python -m benchmarks.first_bind [--singles 10] [--many 50] [--rounds 3]

kube-apiserver, KubeVirt's own admission and virt-controller are real, and kvplace is installed from its
manifests (one replica, webhooks included). There are ten nodes of 128 CPUs, which are Node objects. An
opted-in VM goes through kvplace's webhooks and scheduler. Another VM goes through default-scheduler in the
same cluster, and the API server does not send it to kvplace's webhooks. Time starts when the
VirtualMachineInstance is sent and ends when a watch shows its pod bound. The two kinds take turns: first one
VM at a time, each a second after the one before, then many sent at once by eight clients, where time starts
with the first one sent. A VM that comes within 0.3 s after another change of a ledger may wait so long,
because claims are gathered into one write.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from benchmarks._bindings import Bindings
from benchmarks._tables import table
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.programs import KUBEVIRT
from harness.go_build import built
from harness.kvplace_cluster.installation import Installation
from harness.kvplace_cluster.machines import node_shape
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from kvplace.machines.server_types import read_machine

NODES = 10
KINDS: Mapping[str, Mapping[str, str]] = {"opted in": {"cpu-set": "one-numa"}, "others": {}}
_PATIENCE_S = 60.0
_ALONE_S = 1.0


class Cluster:
    """A cluster with KubeVirt, kvplace and nodes for making and removing VMs."""

    def __init__(self, plane: ControlPlane, virt: KubeVirt) -> None:
        self._plane = plane
        self._virt = virt
        self._namespaces = 0

    def seconds_to_bound(self, count: int, annotations: Mapping[str, str]) -> list[float]:
        """Create VMs at once and answer the seconds from the first one to each binding, ascending."""
        self._namespaces += 1
        namespace = self._plane.create_namespace(f"vms-{self._namespaces}")
        names = [f"vm-{number}" for number in range(count)]

        def create(name: str) -> None:
            self._virt.create(VMIS, namespace, vmi_manifest(name, cores=4, annotations=annotations))

        with Bindings(self._plane, namespace, count) as bindings, ThreadPoolExecutor(min(8, count)) as pool:
            began = time.monotonic()
            list(pool.map(create, names))
            times = bindings.wait()
        self._remove(namespace)
        return [moment - began for moment in times]

    def _remove(self, namespace: str) -> None:
        vmis = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMIS}"
        self._plane.request("DELETE", vmis)
        deadline = time.monotonic() + _PATIENCE_S
        while self._plane.request("GET", vmis)["items"]:
            # There is no kubelet here that would end the pods.
            self._plane.request("DELETE", f"/api/v1/namespaces/{namespace}/pods?gracePeriodSeconds=0")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the VMs of {namespace} are still there after {_PATIENCE_S:.0f} s")
            time.sleep(0.2)


def measure(cluster: Cluster, singles: int, many: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Let the two kinds take turns."""
    found: dict[str, dict[str, list[float]]] = {
        kind: {"one VM": [], "first": [], "median": [], "last": []} for kind in KINDS
    }
    for asked in KINDS.values():
        cluster.seconds_to_bound(1, asked)  # the first one meets cold caches everywhere
    for number in range(singles):
        for kind, asked in KINDS.items():
            time.sleep(_ALONE_S)
            found[kind]["one VM"] += cluster.seconds_to_bound(1, asked)
            print(f"one VM, {kind}, {number + 1} of {singles}", file=sys.stderr)
    for number in range(rounds):
        for kind, asked in KINDS.items():
            times = cluster.seconds_to_bound(many, asked)
            found[kind]["first"].append(times[0])
            found[kind]["median"].append(statistics.median(times))
            found[kind]["last"].append(times[-1])
            print(f"{many} VMs, {kind}, {number + 1} of {rounds}", file=sys.stderr)
    return found


def report(found: dict[str, dict[str, list[float]]], singles: int, many: int, rounds: int) -> None:
    """Print the table."""
    labels = {
        "one VM": f"one VM, median of {singles}",
        **{
            which: f"{many} VMs at once, {which} one, median of {rounds}"
            for which in ("first", "median", "last")
        },
    }
    rows = []
    for which, label in labels.items():
        opted_in, others = (statistics.median(found[kind][which]) for kind in KINDS)
        rows.append([label, f"{opted_in:.2f}", f"{others:.2f}", f"{opted_in / others:.2f}"])
    print(table(["seconds to bound", *KINDS, "ratio"], rows))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--singles", type=int, default=10)
    parser.add_argument("--many", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    machine = read_machine("2x-epyc-9354")
    with (
        ControlPlane() as plane,
        KubeVirt(plane, built(KUBEVIRT)) as virt,
        Installation(plane) as installation,
    ):
        plane.add_scheduler()
        installation.add_scheduler(installation.replicas[0])
        for number in range(NODES):
            name = f"node-{number}"
            node = node_shape(name, machine).manifest(f"172.16.0.{number + 1}")
            plane.request("POST", "/api/v1/nodes", node)
            installation.describe(name, machine)
        found = measure(Cluster(plane, virt), given.singles, given.many, given.rounds)
    report(found, given.singles, given.many, given.rounds)


if __name__ == "__main__":
    main()
