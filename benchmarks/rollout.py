"""How long a rollout of 500 VMs takes, from the command to the last VM that is pinned.

    python -m benchmarks.rollout [--vms 500] [--nodes 50] [--rounds 1] [--vmis]

The command is `kvplace rollout create -f vm-templates/web-server.yaml --count 500 --yes`, as a process of
its own, with its checks and its plan. etcd, kube-apiserver, kube-scheduler, KubeVirt's admission and
virt-controller and kvplace (one replica, installed from its manifests) are real and share the machine with
it. Nodes are Node objects of four server types; their kubelets, virt-handlers and agents are played and
answer at once, so what a guest needs to boot is not in the figures. Each round makes the VMs, asks for the
status, and deletes them again. Times to a stage count from the moment at which a VM was sent; the table has
those of the round in the middle. CPU seconds are those of `create`, from its start to its end: on a machine
that does nothing else they are what limits it. With `--vmis` the same VMs are VirtualMachineInstances, which
spares KubeVirt and the API server the VirtualMachines around them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks._api_requests import Call, ask_all
from benchmarks._processes import cpu_of_all, used_since
from benchmarks._tables import table
from benchmarks.bound_per_second import machines
from benchmarks.cost_per_vm import process_name
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.programs import KUBEVIRT
from harness.go_build import built
from harness.kvplace_cluster.installation import Installation
from harness.kvplace_cluster.machines import node_shape, node_topology
from harness.kvplace_cluster.played_vms import played_vms

TEMPLATE = Path(__file__).resolve().parents[1] / "vm-templates" / "web-server.yaml"
STAGES = ("bound", "running", "pinned")


@dataclass(frozen=True, slots=True)
class Round:
    """What one round came to, in seconds."""

    create: float
    status: float
    delete: float
    cpu: dict[str, float]
    """CPU seconds of `create` by process."""
    report: dict[str, Any]


@contextlib.contextmanager
def running_cluster(nodes: int) -> Iterator[tuple[ControlPlane, Callable[[], dict[str, float]]]]:
    """Start a cluster with KubeVirt, kvplace and nodes; yields it and what its processes have used."""
    programs = built(KUBEVIRT)
    with ControlPlane() as plane, KubeVirt(plane, programs) as virt, Installation(plane) as installation:
        plane.add_scheduler()
        installation.add_scheduler(installation.replicas[0])
        calls: list[Call] = []
        for number, (name, machine) in enumerate(machines(nodes).items()):
            address = f"172.16.{number // 250}.{number % 250 + 1}"
            calls.append(("POST", "/api/v1/nodes", node_shape(name, machine).manifest(address)))
            described = node_topology(name, machine)
            calls.append(("POST", "/apis/kvplace.io/v1alpha1/nodetopologies", described))
        asyncio.run(ask_all(plane, calls))

        def used() -> dict[str, float]:
            replicas = [replica.process for replica in installation.replicas]
            spent: dict[str, float] = {}
            for server in (*plane.servers, *virt.servers, *replicas):
                name = process_name(server.name)
                spent[name] = spent.get(name, 0.0) + cpu_of_all({name: server.pid})[name]
            return {**spent, "played nodes": time.process_time(), "kvplace rollout": _of_children()}

        yield plane, used


def measure(
    plane: ControlPlane, used: Callable[[], dict[str, float]], template: Path, vms: int, number: int
) -> Round:
    """Make VMs, ask for their status, and delete them."""
    namespace = plane.create_namespace(f"rollout-{number}")
    with played_vms(plane, namespace):
        before = used()
        create, report = _called(
            plane, namespace, "create", "-f", str(template), "--name", "web", "--count", str(vms), "--yes"
        )
        spent = used_since(before, used())
        status, _ = _called(plane, namespace, "status", "web")
        delete, _ = _called(plane, namespace, "delete", "web", "--yes", prints=False)
    return Round(create, status, delete, spent, report)


def _vmi_template(folder: Path) -> Path:
    """Write the template's VirtualMachineInstance into a file of its own."""
    vm = yaml.safe_load(TEMPLATE.read_text())
    vmi = {"apiVersion": vm["apiVersion"], "kind": "VirtualMachineInstance", **vm["spec"]["template"]}
    path = folder / "vmi.json"
    path.write_text(json.dumps(vmi))
    return path


def _of_children() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def _called(
    plane: ControlPlane, namespace: str, *arguments: str, prints: bool = True
) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-m", "kvplace", "rollout", *arguments, "-n", namespace]
    environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
    began = time.monotonic()
    done = subprocess.run(
        [*command, *(["-o", "json"] if prints else [])], stdout=subprocess.PIPE, env=environment, check=True
    )
    return time.monotonic() - began, json.loads(done.stdout) if prints else {}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vms", type=int, default=500)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--vmis", action="store_true", help="make VirtualMachineInstances")
    given = parser.parse_args()
    with running_cluster(given.nodes) as (plane, used), tempfile.TemporaryDirectory() as folder:
        template = _vmi_template(Path(folder)) if given.vmis else TEMPLATE
        measure(plane, used, template, 2, 0)  # the first ones meet cold caches everywhere
        rounds = [measure(plane, used, template, given.vms, number) for number in range(1, given.rounds + 1)]
    middle = sorted(rounds, key=lambda one: one.create)[len(rounds) // 2]
    report = middle.report
    counted = f"{given.rounds} round{'s' if given.rounds > 1 else ''}"
    kind = "VirtualMachineInstances" if given.vmis else "VirtualMachines"
    print(f"{given.vms} {kind} of {TEMPLATE.name} on {given.nodes} nodes, {counted}\n")
    rows = [
        [
            stage,
            str(report[stage]),
            *(f"{report['seconds'][stage][key]:.1f}" for key in ("p50", "p95", "max")),
        ]
        for stage in STAGES
    ]
    print(table(["seconds of a VM to", "VMs", "p50", "p95", "max"], rows))
    print()
    rows = [
        [what, *(f"{getattr(one, name):.1f}" for one in rounds)]
        for what, name in (
            ("create: planned, made and pinned", "create"),
            ("status", "status"),
            ("delete: until the last pod is gone", "delete"),
        )
    ]
    print(
        table(["seconds of the whole command", *(f"round {one}" for one in range(1, len(rounds) + 1))], rows)
    )
    print()
    total = sum(middle.cpu.values())
    rows = [[name, f"{spent:.1f}"] for name, spent in sorted(middle.cpu.items(), key=lambda one: -one[1])]
    print(table(["CPU seconds of create", ""], [*rows, ["all", f"{total:.1f}"]]))


if __name__ == "__main__":
    main()
