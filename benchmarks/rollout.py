"""Time of a rollout of 500 VMs, from the command to the last VM that is pinned.

    python -m benchmarks.rollout [--vms 500] [--nodes 50]

The command is `kvplace rollout create -f vm-templates/web-server.yaml --count 500 --yes`, as a process of
its own, with its checks and its plan. etcd, kube-apiserver, kube-scheduler, KubeVirt's admission and
virt-controller and kvplace (one replica, installed from its manifests) are real and share the machine with
it. Nodes are Node objects of four server types. Their kubelets, virt-handlers and agents are simulated and
answer at once, so the figures do not contain the time that a guest needs to boot.

VMs are created, followed and deleted three times:

* as VirtualMachines;
* as VirtualMachineInstances, which need less work of KubeVirt and the API server;
* *without kvplace*: as VirtualMachines without a request for cores, sixteen requests at a time, placed by
  kube-scheduler alone, until the last one runs. This is what KubeVirt itself needs on this machine.

Times to a stage count from the moment when the VM was sent. CPU seconds are those of `create`, from its
start to its end: on an otherwise idle machine they are what limits it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks._api_requests import Call, ask_all
from benchmarks._processes import cpu_of_all, used_since
from benchmarks._tables import table
from benchmarks._vm_rounds import process_name
from benchmarks.bound_per_second import machines
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kube_stream import KubeClient
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.programs import KUBEVIRT
from harness.go_build import built
from harness.kvplace_cluster.installation import Installation
from harness.kvplace_cluster.machines import node_shape, node_topology
from harness.kvplace_cluster.played_vms import played_vms

TEMPLATE = Path(__file__).resolve().parents[1] / "vm-templates" / "web-server.yaml"
Json = dict[str, Any]

STAGES = ("bound", "running", "pinned")
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Round:
    """The time of making VMs, in seconds."""

    title: str
    create: float
    cpu: dict[str, float]
    """CPU seconds of `create` by process."""
    status: float | None = None
    delete: float | None = None
    report: dict[str, Any] | None = None
    """The report of the command, if a rollout made the VMs."""


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
    plane: ControlPlane, used: Callable[[], dict[str, float]], template: Json, vms: int, title: str
) -> Round:
    """Make VMs by a rollout, ask for their status, and delete them."""
    namespace = plane.create_namespace(title.lower().replace(" ", "-"))
    with tempfile.TemporaryDirectory() as folder, played_vms(plane, namespace):
        path = Path(folder) / "template.json"
        path.write_text(json.dumps(template))
        before = used()
        create, report = _called(
            plane, namespace, "create", "-f", str(path), "--name", "web", "--count", str(vms), "--yes"
        )
        spent = used_since(before, used())
        status, _ = _called(plane, namespace, "status", "web")
        delete, _ = _called(plane, namespace, "delete", "web", "--yes", prints=False)
    return Round(title, create, spent, status, delete, report)


def measure_without(
    plane: ControlPlane, used: Callable[[], dict[str, float]], template: Json, vms: int, title: str
) -> Round:
    """Post VirtualMachines that did not opt in, and wait until all of them run."""
    namespace = plane.create_namespace(title.lower().replace(" ", "-"))
    path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachines"
    plain = copy.deepcopy(template)
    del plain["spec"]["template"]["metadata"]["annotations"]
    calls: list[Call] = []
    for number in range(vms):
        plain["metadata"] = {"name": f"web-{number:04}"}
        calls.append(("POST", path, copy.deepcopy(plain)))

    async def made() -> None:
        vmis = path.removesuffix("s") + "instances"
        async with asyncio.timeout(_PATIENCE_S), asyncio.TaskGroup() as group:
            group.create_task(ask_all(plane, calls))
            group.create_task(_all_run(plane, vmis, vms))

    with played_vms(plane, namespace):
        before, began = used(), time.monotonic()
        asyncio.run(made())
        seconds = time.monotonic() - began
        spent = used_since(before, used())
    return Round(title, seconds, {name: spent[name] for name in spent if name != "kvplace rollout"})


async def _all_run(plane: ControlPlane, path: str, count: int) -> None:
    running: set[str] = set()
    async with (
        KubeClient(plane.url, plane.ca_file, plane.admin.token) as client,
        contextlib.aclosing(client.list_and_watch(path, "")) as changes,
    ):
        async for _, vmi in changes:
            if vmi.get("status", {}).get("phase") == "Running":
                running.add(vmi["metadata"]["uid"])
            if len(running) == count:
                return


def _vmi_of(vm: Json) -> Json:
    return {"apiVersion": vm["apiVersion"], "kind": "VirtualMachineInstance", **vm["spec"]["template"]}


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


def _table_of_stages(rounds: Sequence[Round]) -> str:
    rows = [
        [one.title, stage, *(f"{one.report['seconds'][stage][key]:.1f}" for key in ("p50", "p95", "max"))]
        for one in rounds
        if one.report
        for stage in STAGES
    ]
    return table(["seconds of a VM to", "", "p50", "p95", "max"], rows)


def _table_of_commands(rounds: Sequence[Round]) -> str:
    rows = [
        [
            one.title,
            *(
                "" if seconds is None else f"{seconds:.1f}"
                for seconds in (one.create, one.status, one.delete)
            ),
        ]
        for one in rounds
    ]
    return table(["seconds of the whole command", "create", "status", "delete"], rows)


def _table_of_cpu(rounds: Sequence[Round]) -> str:
    names = sorted(rounds[0].cpu, key=lambda name: -rounds[0].cpu[name])
    rows = [[name, *(f"{one.cpu[name]:.1f}" if name in one.cpu else "" for one in rounds)] for name in names]
    total = ["all", *(f"{sum(one.cpu.values()):.1f}" for one in rounds)]
    return table(["CPU seconds of create", *(one.title for one in rounds)], [*rows, total])


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vms", type=int, default=500)
    parser.add_argument("--nodes", type=int, default=50)
    given = parser.parse_args()
    vm = yaml.safe_load(TEMPLATE.read_text())
    with running_cluster(given.nodes) as (plane, used):
        measure(plane, used, vm, 2, "warm up")  # the first ones meet cold caches everywhere
        rounds = [
            measure(plane, used, vm, given.vms, "VirtualMachines"),
            measure(plane, used, _vmi_of(vm), given.vms, "VirtualMachineInstances"),
            measure_without(plane, used, vm, given.vms, "without kvplace"),
        ]
    print(f"{given.vms} VMs of {TEMPLATE.name} on {given.nodes} nodes\n")
    print("\n\n".join([_table_of_commands(rounds), _table_of_stages(rounds), _table_of_cpu(rounds)]))


if __name__ == "__main__":
    main()
