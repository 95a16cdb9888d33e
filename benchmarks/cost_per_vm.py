"""The cost of bringing many VMs to their nodes, with kvplace and without, by process.

    python -m benchmarks.cost_per_vm [--nodes 50 1000 5000] [--vms 500] [--rounds 2]

Two clusters take turns. The first has a real kube-apiserver with KubeVirt's own admission and
virt-controller, and kube-scheduler. The second has in addition kvplace, installed from its manifests (one
replica, webhooks and policies included, and its kube-scheduler beside the cluster's own). Nodes are Node
objects of four server types. Sixteen clients send all VirtualMachineInstances at once; in the second cluster
they request cores (`cpu-set: one-numa`). Time starts with the first one sent and ends when a watch shows the
last pod bound. CPU is what the kernel counts for each process from then until four seconds after the last
binding, so that late work such as events is part of it. Where `perf` is installed, the instructions of the
same time are counted, too: they do not depend on how fast the machine happens to be. The clusters take turns
in the order 1 2 2 1. Tables have medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks._plots import Figure, legend_beside, print_plot
from benchmarks._tables import table
from benchmarks._vm_rounds import Round, VmRounds
from benchmarks.bound_per_second import machines
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.programs import KUBEVIRT
from harness.go_build import built
from harness.kvplace_cluster.installation import Installation
from harness.kvplace_cluster.vms import vmi_manifest

PROCESSES = (
    "kube-apiserver",
    "etcd",
    "virt-controller",
    "KubeVirt's admission",
    "kube-scheduler",
    "kvplace",
)
COLORS = ("#b0b7bf", "#7d8790", "#c9b68c", "#e3d7b8", "#8fb8a8", "#2a6f97")


@dataclass(frozen=True, slots=True)
class Cluster:
    """One of the two clusters, and what VMs ask for in it."""

    rounds: VmRounds
    asking: Mapping[str, str]

    def measure(self, count: int) -> Round:
        """Create VMs, follow them until all are bound, and remove them."""
        return self.rounds.measure(count, lambda name: vmi_manifest(name, cores=4, annotations=self.asking))


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
        yield {
            "without": Cluster(
                VmRounds(bare, lambda: [*bare.servers, *bare_virt.servers], has_kvplace=False), {}
            ),
            "with kvplace": Cluster(
                VmRounds(
                    plane,
                    lambda: [
                        *plane.servers,
                        *virt.servers,
                        *(replica.process for replica in installation.replicas),
                    ],
                    has_kvplace=True,
                ),
                {"cpu-set": "one-numa"},
            ),
        }


def report(nodes: int, vms: int, found: Mapping[str, list[Round]]) -> None:
    """Print the tables of one size of the cluster."""
    rounds = len(found["without"])
    print(f"{nodes} nodes, {vms} VMs at once, medians of {rounds} {'rounds' if rounds > 1 else 'round'}\n")
    seconds = {
        "seconds to the last binding": [
            statistics.median(one.seconds for one in rounds) for rounds in found.values()
        ]
    }
    print(_compared("CPU-ms per VM", {side: [one.cpu_ms for one in found[side]] for side in found}, seconds))
    if all(one.instructions for rounds in found.values() for one in rounds):
        executed = {side: [one.instructions for one in found[side]] for side in found}
        print(f"\n{_compared('million instructions per VM', executed, {})}")
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


def _compared(
    what: str, found: Mapping[str, list[Mapping[str, float]]], more: Mapping[str, list[float]]
) -> str:
    """Compare processes, their sum and what is named `more`, without and with kvplace."""
    medians = {
        name: [statistics.median(one.get(name, 0.0) for one in rounds) for rounds in found.values()]
        for name in PROCESSES
    }
    rows = [
        [name, f"{without:.1f}", f"{with_it:.1f}", f"{with_it - without:+.1f}"]
        for name, (without, with_it) in medians.items()
    ]
    sums = [statistics.median(sum(one.values()) for one in rounds) for rounds in found.values()]
    for name, (without, with_it) in {"all": sums, **more}.items():
        rows.append([name, f"{without:.1f}", f"{with_it:.1f}", f"{with_it / without:.2f} times"])
    return table([what, *found, ""], rows)


def draw(costs: Mapping[str, Mapping[str, float]], figure: Figure) -> None:
    """Draw the CPU time of a VM, a bar for each cluster with a part for each process."""
    panel = figure.subplots()
    names, lefts = list(costs)[::-1], [0.0] * len(costs)
    for process, color in zip(PROCESSES, COLORS, strict=True):
        widths = [costs[name][process] for name in names]
        panel.barh(range(len(names)), widths, left=lefts, color=color, label=process)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    panel.set_yticks(range(len(names)), names)
    panel.grid(visible=False, axis="y")
    panel.set_xlabel("CPU-ms per VM")
    legend_beside(figure, panel, columns=3)


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[50, 1000, 5000], help="sizes of the cluster")
    parser.add_argument("--vms", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    costs: dict[str, dict[str, float]] = {}
    with running_clusters() as clusters:
        present = 0
        for nodes in sorted(given.nodes):
            added = dict(list(machines(nodes).items())[present:])
            for cluster in clusters.values():
                cluster.rounds.add_nodes(added, present)
                if not present:
                    cluster.measure(2)  # the first ones meet cold caches everywhere
            present = nodes
            found: dict[str, list[Round]] = {name: [] for name in clusters}
            for number in range(given.rounds):
                for name, cluster in list(clusters.items())[:: 1 if number % 2 == 0 else -1]:
                    found[name].append(cluster.measure(given.vms))
                    spent = found[name][-1].sum_ms
                    print(f"{nodes} nodes, {name}: {spent:.1f} CPU-ms per VM", file=sys.stderr, flush=True)
            report(nodes, given.vms, found)
            for name, rounds in found.items():
                cpu = [one.cpu_ms for one in rounds]
                costs[f"{nodes} nodes, {name}"] = {
                    process: statistics.median(one.get(process, 0.0) for one in cpu) for process in PROCESSES
                }
    print_plot("cost_per_vm", partial(draw, costs), title="CPU time until a VM is bound", height=3.5)


if __name__ == "__main__":
    main()
