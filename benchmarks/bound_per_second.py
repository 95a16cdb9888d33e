"""Pods bound per second by kube-scheduler with kvplace, and by the same kube-scheduler without it.

    python -m benchmarks.bound_per_second [--nodes 50 1000 5000] [--pods 500] [--rounds 1] [--filled 0.9]
        [--nominate-from-nodes 1000] [--schedulers "with kvplace" ...]

etcd, kube-apiserver and kube-scheduler are real and share one machine. Nodes are Node objects of four server
types. The pods request 2 to 16 CPUs inside one NUMA node. They are created before the scheduler starts, and
are as pod admission would make and store them, without a call of admission: those for kvplace have no
`managedFields`. The rate is the number of pods after the first, divided by the seconds from the first
binding to the last, as one watch sees them. The schedulers take turns, and the tables have medians.

* *with kvplace*: kvplace is installed from its manifests (one replica, TLS both ways, rights and policies
  active), with the configuration of its own scheduler.
* *one by one*: the same, but each pod has a toleration of its own, for a taint that no node has. So no two
  pods are alike, and `serve` plans and claims each of them alone.
* *kube-scheduler*: the same pods without the resource that calls kvplace, in a cluster of its own where
  nothing of kvplace is installed.
* *unbatched*: the same with the feature gate OpportunisticBatching off. kube-scheduler itself switches
  batching off for every profile with an extender. Ratios are to this row.
* *unbatched, all nodes*: in a cluster of more than 100 nodes kube-scheduler checks a sample of them. With
  kvplace it checks all, since a sample may miss the one node with the right cores. Here it does so too.

Finally the largest cluster is measured again, nearly full: every node has a bound pod that owns the given
share (`--filled`, 0 leaves this out) of its CPUs.

CPU seconds per 1,000 pods count from the first binding to four seconds after the last, so that the work that
follows a binding is part of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks._api_requests import Call, ask_all, counted_requests, requests_since
from benchmarks._bindings import Bindings
from benchmarks._fillers import fill
from benchmarks._plots import Figure, legend_beside, pairs_of_bars, print_plot
from benchmarks._processes import cpu_of_all, used_since
from benchmarks._tables import table
from harness.control_plane.cluster import ControlPlane, Scheduler
from harness.kvplace_cluster.installation import Installation
from harness.kvplace_cluster.machines import node_shape, node_topology
from kvplace.admission.objects import AdmissionSettings
from kvplace.admission.pod import admit_pod
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import MARKER_RESOURCE
from kvplace.machines.server_types import read_machine

SERVER_TYPES = ("2x-epyc-9354-nps2", "2x-xeon-6338", "epyc-9654p", "2x-xeon-8480plus-snc4")
VCPUS = (2, 2, 2, 4, 4, 4, 8, 8, 16)
AFTERWARDS_S = 4.0
WITHOUT, WITH = "unbatched", "with kvplace"
UNBATCHED = ("--feature-gates=OpportunisticBatching=false",)
ALL_NODES = {"profiles": [{"schedulerName": "default-scheduler", "percentageOfNodesToScore": 100}]}
_WITHOUT_RECORD: dict[str, Any] = {"metadata": {"managedFields": [{}]}}
"""The patch that leaves a pod as admission stores it."""
SAMPLED_ABOVE = 100
"""kube-scheduler checks every node of a cluster that is not larger, with any configuration."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round of one scheduler."""

    pods_per_second: float
    cpu: dict[str, float]
    """CPU seconds per 1,000 pods by process."""
    requests: dict[str, float]
    """Requests that the API server answered per pod: resource and verb."""
    pods_per_ledger_write: float = 0.0


class Side:
    """One cluster with its nodes, and the ways to start a scheduler in it."""

    def __init__(self, plane: ControlPlane, installation: Installation | None) -> None:
        self.plane = plane
        self.installation = installation
        self._rounds = 0
        self._filled = 0

    def fill(self, machines: dict[str, Topology], share: float) -> None:
        """Let VMs run on a share of the CPUs of nodes."""
        fill(self.plane, machines, share, ledgers=self.installation is not None)
        self._filled += len(machines)

    def add_nodes(self, machines: dict[str, Topology]) -> None:
        """Create Node objects, and what kvplace's agent would publish about them."""
        calls: list[Call] = []
        for number, (name, machine) in enumerate(machines.items()):
            manifest = node_shape(name, machine).manifest(f"172.16.{number // 250}.{number % 250 + 1}")
            calls.append(("POST", "/api/v1/nodes", manifest))
            if self.installation is not None:
                described = node_topology(name, machine)
                calls.append(("POST", "/apis/kvplace.io/v1alpha1/nodetopologies", described))
        asyncio.run(ask_all(self.plane, calls))

    def measure(self, start: Callable[[], Scheduler], pods: Sequence[Json]) -> Round:
        """Create the pods, start a scheduler, and follow it until all are bound."""
        self._rounds += 1
        namespace = self.plane.create_namespace(f"round-{self._rounds}")
        path = f"/api/v1/namespaces/{namespace}/pods"
        asyncio.run(ask_all(self.plane, [("POST", path, pod) for pod in pods]))
        if self.installation is not None:
            patches = [("PATCH", f"{path}/{pod['metadata']['name']}", _WITHOUT_RECORD) for pod in pods]
            asyncio.run(ask_all(self.plane, patches))
        before = counted_requests(self.plane)
        at_first: dict[str, float] = {}
        with Bindings(
            self.plane, namespace, len(pods), on_first=lambda: at_first.update(self._cpu())
        ) as bindings:
            scheduler = start()
            times = bindings.wait()
        while_binding = counted_requests(self.plane)
        time.sleep(AFTERWARDS_S)
        used = used_since(at_first, self._cpu())
        after = counted_requests(self.plane)
        scheduler.stop()
        deletions = [
            ("DELETE", f"{path}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0}) for pod in pods
        ]
        asyncio.run(ask_all(self.plane, deletions))
        self._until_released()
        claims = requests_since(before, while_binding).get("update nodeledgers", 0.0)
        return Round(
            (len(times) - 1) / (times[-1] - times[0]),
            {name: seconds * 1000 / len(pods) for name, seconds in used.items()},
            {name: count / len(pods) for name, count in requests_since(before, after).items()},
            len(pods) / claims if claims else 0.0,
        )

    def _cpu(self) -> dict[str, float]:
        running = [server for server in self.plane.servers if server.is_running]
        pids = {
            "kube-scheduler" if "scheduler" in server.name else server.name: server.pid for server in running
        }
        if self.installation is not None:
            pids["kvplace"] = self.installation.replicas[0].process.pid
        return cpu_of_all(pids)

    def _until_released(self) -> None:
        if self.installation is None:
            return
        path = "/apis/kvplace.io/v1alpha1/nodeledgers"
        while self._claims(path) > self._filled:
            time.sleep(1.0)

    def _claims(self, path: str) -> int:
        return sum(len(ledger["spec"]["claims"]) for ledger in self.plane.request("GET", path)["items"])


def machines(count: int) -> dict[str, Topology]:
    """Name nodes of the four server types in turn."""
    types = [read_machine(name) for name in SERVER_TYPES]
    return {f"node-{number:04}": types[number % len(types)] for number in range(count)}


def pods(count: int) -> list[Json]:
    """Make pods as pod admission makes them; always the same ones."""
    chance = random.Random(1)
    return [_pod(f"pod-{number:04}", chance.choice(VCPUS)) for number in range(count)]


def _pod(name: str, vcpus: int) -> Json:
    size = {"cpu": str(vcpus), "memory": f"{vcpus}Gi"}
    asked = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {"cpu-set": "one-numa"}},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [
                {"name": "main", "image": "example.test/vm", "resources": {"requests": size, "limits": size}}
            ],
        },
    }
    admitted = admit_pod(
        asked, namespace="bench", settings=AdmissionSettings(sidecar_image="example.test/hook")
    )
    made = dict(admitted.object)
    del made["metadata"]["annotations"]["cpu-set"]
    return made


def unlike_others(pod: Json) -> Json:
    """Make the same pod one of its own kind, which is not planned with others."""
    copy: Json = json.loads(json.dumps(pod))
    own = {"key": f"example.test/{pod['metadata']['name']}", "operator": "Exists"}
    copy["spec"].setdefault("tolerations", []).append(own)
    return copy


def without_kvplace(pod: Json) -> Json:
    """Make the same pod one for a kube-scheduler that knows nothing of kvplace."""
    copy: Json = json.loads(json.dumps(pod))
    copy["spec"]["schedulerName"] = "default-scheduler"
    for kind in ("requests", "limits"):
        del copy["spec"]["containers"][0]["resources"][kind][MARKER_RESOURCE]
    return copy


@contextlib.contextmanager
def running_sides(nominate_from_nodes: int) -> Iterator[tuple[Side, Side]]:
    """Start a cluster without and one with kvplace."""
    flags = [f"--nominate-from-nodes={nominate_from_nodes}"]
    with (
        ControlPlane() as bare,
        ControlPlane() as plane,
        Installation(plane, webhooks=False, flags=flags) as installation,
    ):
        yield Side(bare, None), Side(plane, installation)


def measure(
    nodes: int, sides: tuple[Side, Side], count: int, rounds: int, wanted: Sequence[str]
) -> dict[str, list[Round]]:
    """Let the schedulers take turns on clusters that have these nodes already."""
    bare, side = sides
    asking = pods(count)
    plain = [without_kvplace(pod) for pod in asking]
    unlike = [unlike_others(pod) for pod in asking]
    installation = side.installation
    assert installation is not None

    def own_scheduler() -> Scheduler:
        return installation.add_scheduler(installation.replicas[0])

    schedulers: dict[str, tuple[Side, Sequence[Json], Callable[[], Scheduler]]] = {
        "kube-scheduler": (bare, plain, bare.plane.add_scheduler),
        "unbatched": (bare, plain, lambda: bare.plane.add_scheduler(flags=UNBATCHED)),
        "unbatched, all nodes": (
            bare,
            plain,
            lambda: bare.plane.add_scheduler(ALL_NODES, flags=UNBATCHED),
        ),
        "with kvplace": (side, asking, own_scheduler),
        "one by one": (side, unlike, own_scheduler),
    }
    if nodes <= SAMPLED_ABOVE:
        del schedulers["unbatched, all nodes"]
    if wanted:
        schedulers = {name: how for name, how in schedulers.items() if name in wanted}
    found: dict[str, list[Round]] = {name: [] for name in schedulers}
    for number in range(rounds):
        first = number % len(schedulers)
        for name in [*list(schedulers)[first:], *list(schedulers)[:first]]:
            cluster, made, start = schedulers[name]
            found[name].append(cluster.measure(start, made))
            print(
                f"{nodes} nodes, round {number + 1}, {name}: {found[name][-1].pods_per_second:.0f} pods/s",
                file=sys.stderr,
                flush=True,
            )
    return found


def report(results: dict[str, dict[str, list[Round]]], count: int) -> None:
    """Print the tables."""
    for cluster, found in results.items():
        rates = {name: statistics.median(r.pods_per_second for r in rounds) for name, rounds in found.items()}
        cpu = {name: _medians([r.cpu for r in rounds]) for name, rounds in found.items()}
        reference = rates.get("unbatched", 0.0)
        rounds = max(map(len, found.values()))
        print(f"{cluster}, {count} pods, medians of {rounds} {'rounds' if rounds > 1 else 'round'}\n")
        rows = [
            [
                name,
                f"{rates[name]:.0f}",
                f"{min(r.pods_per_second for r in rounds):.0f}-{max(r.pods_per_second for r in rounds):.0f}",
                f"{rates[name] / reference:.2f}" if reference else "",
                *(
                    f"{cpu[name].get(process, 0.0):.1f}"
                    for process in ("kube-apiserver", "kube-scheduler", "kvplace", "etcd")
                ),
                f"{sum(cpu[name].values()):.1f}",
            ]
            for name, rounds in found.items()
        ]
        heads = [
            "",
            "pods/s",
            "lowest-highest",
            "ratio",
            "API server",
            "scheduler",
            "kvplace",
            "etcd",
            "CPU-s per 1,000",
        ]
        print(table(heads, rows))
        print()
        writes = {name: _medians([r.requests for r in rounds]) for name, rounds in found.items()}
        kinds = sorted({kind for counted in writes.values() for kind in counted})
        rows = [[kind, *(f"{writes[name].get(kind, 0.0):.2f}" for name in found)] for kind in kinds]
        print(table(["writes per pod", *found], rows))
        for name in ("with kvplace", "one by one"):
            if name not in found:
                continue
            claims = statistics.median(r.pods_per_ledger_write for r in found[name])
            print(f"\npods claimed by one write to a ledger, {name}: {claims:.1f}")
        print()


def compared(results: Mapping[str, Mapping[str, Sequence[Round]]]) -> dict[str, list[tuple[float, float]]]:
    """Pair the medians without kvplace and with it, one pair for each cluster."""
    sides = [[found[name] for name in (WITHOUT, WITH)] for found in results.values()]
    return {
        "pods bound per second": [
            (_median(plain, lambda one: one.pods_per_second), _median(ours, lambda one: one.pods_per_second))
            for plain, ours in sides
        ],
        "CPU seconds per 1,000 pods": [
            (
                _median(plain, lambda one: sum(one.cpu.values())),
                _median(ours, lambda one: sum(one.cpu.values())),
            )
            for plain, ours in sides
        ],
    }


def draw(clusters: Sequence[str], shown: Mapping[str, Sequence[tuple[float, float]]], figure: Figure) -> None:
    """Draw each kind of figure in a panel, two bars for each cluster."""
    panels = figure.subplots(1, len(shown), sharey=True)
    for panel, (kind, pairs) in zip(panels, shown.items(), strict=True):
        pairs_of_bars(panel, clusters, pairs, ("kube-scheduler without kvplace", "with kvplace"))
        panel.set_xlabel(kind)
    legend_beside(figure, panels[0], columns=2)


def _median(rounds: Sequence[Round], of: Callable[[Round], float]) -> float:
    return statistics.median(map(of, rounds))


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[50, 1000, 5000], help="sizes of the cluster")
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--filled", type=float, default=0.9, help="share of the CPUs that VMs have at last")
    parser.add_argument("--nominate-from-nodes", type=int, default=1000, help="as for `serve`")
    parser.add_argument("--schedulers", nargs="+", default=(), help="only these, by the names in the tables")
    given = parser.parse_args()
    results: dict[str, dict[str, list[Round]]] = {}
    with running_sides(given.nominate_from_nodes) as sides:
        present = 0
        for nodes in sorted(given.nodes):
            added = dict(list(machines(nodes).items())[present:])
            for side in sides:
                side.add_nodes(added)
            present = nodes
            results[f"{nodes} nodes"] = measure(nodes, sides, given.pods, given.rounds, given.schedulers)
        if given.filled:
            for side in sides:
                side.fill(machines(present), given.filled)
            name = f"{present} nodes, {given.filled:.0%} full"
            results[name] = measure(present, sides, given.pods, given.rounds, given.schedulers)
    report(results, given.pods)
    if not given.schedulers:
        shown = partial(draw, list(results), compared(results))
        print_plot("bound_per_second", shown, title="Pods bound by one scheduler", height=3.0)


if __name__ == "__main__":
    main()
