"""Two kube-schedulers that place pods on the same nodes at the same moment.

    python -m benchmarks.two_schedulers [--nodes 50] [--pods 300] [--rounds 3]

One is the cluster's own kube-scheduler, with kvplace's extender in its configuration; the other is
kvplace's. The pods that request cores name one or the other in turn, and half as many plain pods go to the
first. Both are stopped (SIGSTOP) while the pods are created, and begin together. Neither knows what the
other one is about to bind: no core gets two owners, but a decision can lose against the other scheduler's
and is then made again. For comparison, the same pods with one scheduler for all that request cores; plain
pods then have a scheduler of their own, which calls no extender. Nodes are of four server types.

Conflicts are counted by kvplace and by the API server, per pod that requests cores. CPU counts from the
moment when both begin until four seconds after the last binding, of all processes and per pod of either
kind. *oversold* nodes have pods that request more CPUs than the node has; the kubelet would reject pods
there. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._api_requests import Json, ask_all
from benchmarks._bindings import Bindings
from benchmarks._processes import cpu_of_all, used_since
from benchmarks._tables import table
from benchmarks.bound_per_second import machines, pods, without_kvplace
from harness.control_plane.cluster import ControlPlane, Scheduler
from harness.control_plane.kubelet_admission import cpu_request
from harness.kvplace_cluster.installation import Installation, Replica
from harness.kvplace_cluster.machines import node_shape, node_topology

MAIN = "default-scheduler"
OWN = "kvplace-scheduler"
AFTERWARDS_S = 4.0
LEDGERS = "/apis/kvplace.io/v1alpha1/nodeledgers"


@dataclass(frozen=True, slots=True)
class Way:
    """The division of the pods with a request, and the extender of each scheduler."""

    name: str
    schedulers: int
    replicas: int


WAYS = (
    Way("one scheduler", 1, 1),
    Way("two, one replica", 2, 1),
    Way("two, a replica each", 2, 2),
)


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round; counts are per pod with a request, CPU is per pod."""

    pods_per_second: float
    filters: float
    binds_refused: float
    ledger_writes: float
    ledger_conflicts: float
    bindings_refused: float
    oversold: int
    cpu_ms: dict[str, float]


class Cluster:
    """One cluster with kvplace, two replicas of it, and its nodes."""

    def __init__(self, plane: ControlPlane, installation: Installation, nodes: int) -> None:
        self._plane = plane
        self._installation = installation
        self._rounds = 0
        self._cpus: dict[str, int] = {}
        calls: list[tuple[str, str, Json | None]] = []
        for number, (name, machine) in enumerate(machines(nodes).items()):
            shape = node_shape(name, machine)
            self._cpus[name] = shape.cpus - shape.reserved_cpus
            address = f"172.16.{number // 250}.{number % 250 + 1}"
            calls.append(("POST", "/api/v1/nodes", shape.manifest(address)))
            calls.append(("POST", "/apis/kvplace.io/v1alpha1/nodetopologies", node_topology(name, machine)))
        asyncio.run(ask_all(plane, calls))

    def measure(self, way: Way, count: int) -> Round:
        """Let the schedulers begin together and follow them until all pods are bound."""
        self._rounds += 1
        namespace = self._plane.create_namespace(f"round-{self._rounds}")
        path = f"/api/v1/namespaces/{namespace}/pods"
        asking = pods(count)
        if way.schedulers == 2:
            for pod in asking[::2]:
                pod["spec"]["schedulerName"] = MAIN
        plain = [without_kvplace(pod) for pod in pods(count // 2)]
        for pod in plain:
            pod["metadata"]["name"] = f"plain-{pod['metadata']['name']}"
        schedulers = self._start(way)
        replicas = self._installation.replicas
        before = _counted(self._plane, replicas)
        total = len(asking) + len(plain)
        with contextlib.ExitStack() as stack:
            bindings = stack.enter_context(Bindings(self._plane, namespace, total))
            with contextlib.ExitStack() as stopped:
                for scheduler in schedulers:
                    stopped.enter_context(scheduler.process.paused())
                asyncio.run(ask_all(self._plane, [("POST", path, pod) for pod in [*asking, *plain]]))
                cpu = self._cpu(schedulers)
            times = bindings.wait()
        time.sleep(AFTERWARDS_S)
        used = used_since(cpu, self._cpu(schedulers))
        counts = {
            name: (value - before.get(name, 0.0)) / count
            for name, value in _counted(self._plane, replicas).items()
        }
        oversold = self._oversold(path)
        for scheduler in schedulers:
            scheduler.stop()
        asyncio.run(
            ask_all(
                self._plane,
                [
                    ("DELETE", f"{path}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
                    for pod in [*asking, *plain]
                ],
            )
        )
        while any(ledger["spec"]["claims"] for ledger in self._plane.request("GET", LEDGERS)["items"]):
            time.sleep(0.2)
        return Round(
            (len(times) - 1) / (times[-1] - times[0]),
            oversold=oversold,
            cpu_ms={name: seconds * 1000 / total for name, seconds in used.items()},
            **counts,
        )

    def _start(self, way: Way) -> list[Scheduler]:
        installation, plane = self._installation, self._plane
        first, *others = installation.replicas
        own = installation.add_scheduler(first)
        if way.schedulers == 1:
            return [own, plane.add_scheduler()]
        asked = others[0] if way.replicas == 2 else first
        return [own, installation.add_scheduler(asked, names=(MAIN,))]

    def _cpu(self, schedulers: Sequence[Scheduler]) -> dict[str, float]:
        found = cpu_of_all({name: self._plane.server(name).pid for name in ("kube-apiserver", "etcd")})
        found["schedulers"] = sum(cpu_of_all({"": one.process.pid})[""] for one in schedulers)
        found["kvplace"] = sum(
            cpu_of_all({"": replica.process.pid})[""] for replica in self._installation.replicas
        )
        return found

    def _oversold(self, path: str) -> int:
        requested: dict[str, int] = {}
        for pod in self._plane.request("GET", path)["items"]:
            node = pod["spec"]["nodeName"]
            requested[node] = requested.get(node, 0) + cpu_request(pod)
        return sum(asked > self._cpus[node] * 1000 for node, asked in requested.items())


_SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


def _counted(plane: ControlPlane, replicas: Sequence[Replica]) -> dict[str, float]:
    """Count what all replicas and the API server have seen since they began."""
    counts = dict.fromkeys(
        ("filters", "binds_refused", "ledger_writes", "ledger_conflicts", "bindings_refused"), 0.0
    )
    for replica in replicas:
        for name, labels, value in _SAMPLE.findall(replica.metrics()):
            match name:
                case "kvplace_extender_filter_seconds_count":
                    counts["filters"] += float(value)
                case "kvplace_extender_bind_seconds_count" if "refused" in labels:
                    counts["binds_refused"] += float(value)
                case "kvplace_ledger_write_seconds_count":
                    counts["ledger_writes"] += float(value)
                case "kvplace_ledger_conflicts_total":
                    counts["ledger_conflicts"] += float(value)
                case _:
                    pass
    for name, labels, value in _SAMPLE.findall(plane.fetch_text(plane.url, "/metrics")):
        wanted = ('code="409"', 'resource="pods"', 'subresource="binding"')
        if name == "apiserver_request_total" and all(one in labels for one in wanted):
            counts["bindings_refused"] += float(value)
    return counts


def report(results: dict[str, list[Round]], nodes: int, count: int) -> None:
    """Print the tables."""

    def median(rounds: list[Round], name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in rounds))

    rounds = len(next(iter(results.values())))
    print(
        f"{nodes} nodes, {count} pods with a request, {count // 2} plain ones, medians of {rounds} rounds\n"
    )
    counts = ("filters", "binds_refused", "ledger_writes", "ledger_conflicts", "bindings_refused")
    heads = [
        "",
        "pods/s",
        "Filter calls",
        "binds refused",
        "ledger writes",
        "lost ones",
        "bindings 409",
        "oversold",
    ]
    rows = [
        [
            way,
            f"{median(found, 'pods_per_second'):.0f}",
            *(f"{median(found, name):.2f}" for name in counts),
            f"{max(one.oversold for one in found)}",
        ]
        for way, found in results.items()
    ]
    print(table(heads, rows))
    print()
    processes = list(next(iter(results.values()))[0].cpu_ms)
    rows = []
    for way, found in results.items():
        costs = [statistics.median(one.cpu_ms[process] for one in found) for process in processes]
        rows.append([way, *(f"{cost:.1f}" for cost in costs), f"{sum(costs):.1f}"])
    print(table(["CPU-ms per pod", *processes, "sum"], rows))


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument(
        "--pods", type=int, default=300, help="pods with a request; half as many plain ones join them"
    )
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    results: dict[str, list[Round]] = {way.name: [] for way in WAYS}
    with ControlPlane() as plane, Installation(plane, replicas=2, webhooks=False) as installation:
        cluster = Cluster(plane, installation, given.nodes)
        for number in range(given.rounds):
            for way in [*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]]:
                results[way.name].append(cluster.measure(way, given.pods))
                print(f"round {number + 1}, {way.name}: {results[way.name][-1]}", file=sys.stderr, flush=True)
    report(results, given.nodes, given.pods)


if __name__ == "__main__":
    main()
