"""Time and CPU of a migration that makes room, without the copy of the guest.

    python -m benchmarks.migration [--rounds 5]

etcd, kube-apiserver, kube-scheduler, KubeVirt's admission and virt-controller and kvplace (one replica,
installed from its manifests with the component `moves-between-nodes`) are real. Two nodes of 16 CPUs are
hollow, and each has a VM of seven vCPUs and one of four. A VM of seven is created and fits nowhere, so
one of the small VMs migrates. Its guest is played: the source ends once the target pod is bound.

* *search*: from the VM that waits to the reservation of the target, with the pause until `serve` tries pods
  that every node has too few CPUs for (up to 10 s).
* *migration created*, *target bound*: from the step before.
* *waiting VM bound*: from the end of the source.
* *serve, CPU*: of all this, less what an idle `serve` uses in the same time.

Each figure is the median of the rounds, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks._processes import cpu_seconds
from benchmarks._tables import table
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.hollow_node import nodes_in_background
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.programs import KUBEVIRT
from harness.go_build import built
from harness.kvplace_cluster.installation import Installation, described_nodes
from tests.end_to_end.crowded_nodes import NODES, Crowded
from tests.end_to_end.pods_that_ask import LEDGERS, MACHINE

STEPS = ("search", "migration created", "target bound", "waiting VM bound", "serve, CPU")
_IDLE_S = 10.0
Json = dict[str, Any]


def measure(crowded: Crowded, serve: int) -> dict[str, float]:
    """Let one VM migrate; returns the seconds of each step."""
    virt = crowded.virt
    before = cpu_seconds(serve)
    time.sleep(_IDLE_S)
    idle = (cpu_seconds(serve) - before) / _IDLE_S

    def when(path: str, is_wanted: Callable[[Json], bool]) -> float:
        virt.first(path, is_wanted)
        return time.monotonic()

    def claims(ledger: Json) -> Sequence[Json]:
        return list(ledger["spec"].get("claims", {}).values())

    began, before = time.monotonic(), cpu_seconds(serve)
    with ThreadPoolExecutor() as pool:
        of_target = f"{LEDGERS}?fieldSelector=metadata.name={NODES[1]}"
        reserved = pool.submit(when, of_target, lambda one: any("reserved" in claim for claim in claims(one)))
        of_kvplace = f"{crowded.migrations}?labelSelector=kvplace.io/move=true"
        created = pool.submit(when, of_kvplace, lambda _: True)
        waiting = crowded.wait_for_room()["metadata"]["name"]
        target = virt.launcher_pod(crowded.namespace, "moves", other_than=crowded.source["metadata"]["uid"])
        crowded.bound(target)
        bound = time.monotonic()
        name = crowded.source["metadata"]["name"]
        crowded.nodes.do(crowded.nodes.nodes.end_container(crowded.namespace, name, "compute"))
        ended = time.monotonic()
        pod = f"{crowded.pods}?fieldSelector=metadata.name={waiting}"
        done = when(pod, lambda one: bool(one["spec"].get("nodeName")))
        used = cpu_seconds(serve) - before - idle * (done - began)
        times = (
            reserved.result() - began,
            created.result() - reserved.result(),
            bound - created.result(),
            done - ended,
            used,
        )
    return dict(zip(STEPS, times, strict=True))


def report(rounds: Sequence[dict[str, float]]) -> None:
    """Print the table."""
    rows = []
    for step in STEPS:
        found = [one[step] for one in rounds]
        rows.append([step, *(f"{1000 * pick(found):.0f}" for pick in (statistics.median, min, max))])
    print(table(["ms", "median", "lowest", "highest"], rows))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found = []
    with (
        ControlPlane() as plane,
        KubeVirt(plane, built(KUBEVIRT)) as virt,
        Installation(plane, components=("moves-between-nodes",)) as installation,
    ):
        plane.add_scheduler()
        (replica,) = installation.replicas
        installation.add_scheduler(replica)
        for number in range(given.rounds):
            if number:  # so that it searches at once, and may begin as many migrations again
                replica.process.kill()
                replica.start()
                replica.wait_until_ready()
            with (
                nodes_in_background(plane, ()) as nodes,
                described_nodes(installation, dict.fromkeys(NODES, MACHINE)),
            ):
                namespace = plane.create_namespace(f"round-{number}")
                crowded = Crowded(plane, virt, installation, nodes, namespace)
                crowded.agents_report()
                found.append(measure(crowded, replica.process.pid))
                print(f"round {number + 1} of {given.rounds}", file=sys.stderr)
                plane.remove_namespace(namespace)
    report(found)


if __name__ == "__main__":
    main()
