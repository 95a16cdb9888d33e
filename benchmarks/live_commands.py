"""Time of commands on a live cluster, from the shell's prompt to the whole answer.

    python -m benchmarks.live_commands [--nodes 1000] [--vms 5000] [--rounds 3]

etcd and kube-apiserver are real, with the CRDs of the manifests, and run on the same machine as the command.
The nodes are 2x-epyc-9354-nps2 (128 CPUs) and 60 % full of VMs of 2 to 16 vCPUs that came and went; each VM
has a claim in its node's ledger. The pods for `get vms` are as large as those of virt-launcher. One pod
waits for more CPUs than any NUMA node has. Each command is a process of its own; the table shows the median
of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._api_requests import Call, ask_all
from benchmarks._tables import table
from harness.control_plane.cluster import ControlPlane
from kvplace.core.allocator.allocate import try_place
from kvplace.core.errors import ExitCode
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, LedgerChange, claim_of, ledger_document
from kvplace.core.node_topology import topology_document
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import Bytes, PodUid
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACED_LABEL, REQUEST
from kvplace.machines.server_types import read_machine

CRDS = Path(__file__).resolve().parents[1] / "manifests" / "crd"
OURS = "/apis/kvplace.io/v1alpha1"
MACHINE, NAMESPACE, FULL = "2x-epyc-9354-nps2", "vms", 0.6
_VCPUS = (2, 2, 2, 4, 4, 4, 8, 8, 16)
_PATTERNS = 8

Json = dict[str, Any]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--vms", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ControlPlane() as plane:
        plane.kubectl("apply", "--server-side", "-k", str(CRDS))
        plane.wait_for_crds("nodeledgers.kvplace.io", "nodetopologies.kvplace.io")
        claims = asyncio.run(fill(plane, options.nodes, options.vms))
        print(f"{options.nodes} nodes with {claims} VMs in their ledgers, {options.vms} pods\n")
        commands: Sequence[Sequence[str]] = (
            ("top", "nodes"),
            ("get", "nodes"),
            ("get", "node", "node-0007"),
            ("map", "node-0007"),
            ("map", "--all"),
            ("get", "vms", "-A"),
            ("get", "vms", "-n", NAMESPACE, "-l", "app=small"),
            ("explain", "pod/waiting", "-n", NAMESPACE),
            ("doctor",),
        )
        rows = []
        for command in commands:
            taken = [measure(plane, command) for _ in range(options.rounds)]
            seconds, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
            rows.append((f"kubectl kvplace {' '.join(command)}", f"{seconds:.2f} s", f"{cpu:.2f} s"))
        print(table(("command", "time", "its CPU"), rows))
    return 0


def measure(plane: ControlPlane, command: Sequence[str]) -> tuple[float, float]:
    """Run a command once; returns its seconds, and those of CPU."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "kvplace", *command, "--kubeconfig", str(plane.kubeconfig)],
        stdout=subprocess.DEVNULL,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (ExitCode.DONE, ExitCode.DOES_NOT_FIT, ExitCode.FAILED, ExitCode.PARTLY_DONE)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def fill(plane: ControlPlane, nodes: int, vms: int) -> int:
    """Create all objects; returns how many VMs the ledgers name."""
    machine, chance = read_machine(MACHINE), random.Random(3)
    patterns = [running(machine, chance) for _ in range(_PATTERNS)]
    spec = topology_document(machine)
    calls: list[Call] = []
    claims = 0
    for number in range(nodes):
        name = f"node-{number:04}"
        calls.append(("POST", "/api/v1/nodes", {"metadata": {"name": name}}))
        calls.append(("POST", f"{OURS}/nodetopologies", ours("NodeTopology", name, spec)))
        ledger = renamed(patterns[number % _PATTERNS], number)
        claims += len(ledger.claims)
        calls.append(("POST", f"{OURS}/nodeledgers", ours("NodeLedger", name, ledger_document(ledger))))
    plane.create_namespace(NAMESPACE)
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    for number in range(vms):
        labels = {"app": "small" if number % 50 == 0 else "web"}
        calls.append(("POST", pods, pod(f"vm-{number:05}", 4, labels, f"node-{number % nodes:04}")))
    calls.append(("POST", pods, pod("waiting", 100, {"app": "large"}, "")))
    await ask_all(plane, calls)
    return claims


def running(machine: Topology, chance: random.Random) -> Ledger:
    """Fill a machine with VMs; some have ended since."""
    ledger, wanted, number = Ledger(), int(machine.allocatable.bit_count() * FULL), 0
    while ledger.owned.bit_count() < wanted:
        number += 1
        request = Request(chance.choice(_VCPUS), PinningOptions(scope=Scope.ONE_NUMA), Bytes(4 << 30), {}, 0)
        placement = try_place(machine, free_of(machine, ledger), request)
        if placement is None:
            break
        uid = PodUid(f"00000000-0000-4000-8000-{number:012}")
        name = f"vm-{number}"
        placed = claim_of(uid, placement, namespace=NAMESPACE, pod=f"virt-launcher-{name}", vmi=name)
        ledger = ledger.after(LedgerChange(claims=(placed,)))
        if chance.random() < 0.3:
            ledger = ledger.after(LedgerChange(releases=(chance.choice(sorted(ledger.claims)),)))
    return ledger


def renamed(ledger: Ledger, node: int) -> Ledger:
    """Give the VMs of a pattern UIDs of their own."""

    def uid(before: PodUid) -> PodUid:
        return PodUid(f"{node:08x}{before[8:]}")

    claims = {uid(known): claim for known, claim in ledger.claims.items()}
    return Ledger({cpu: uid(owner) for cpu, owner in ledger.owners.items()}, claims)


def ours(kind: str, name: str, spec: Json) -> Json:
    """Write one of kvplace's objects."""
    return {"apiVersion": "kvplace.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def pod(name: str, vcpus: int, labels: Json, node: str) -> Json:
    """Write the pod of a VM, about as large as that of virt-launcher."""
    request = Request(vcpus, PinningOptions(scope=Scope.ONE_NUMA), Bytes(4 << 30), {}, 0)
    padding = {f"example.test/setting-{number}": "x" * 400 for number in range(25)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {PLACED_LABEL: "true", **labels},
            "annotations": {REQUEST: write_request(PodRequest(request)), **padding},
        },
        "spec": {
            **({"nodeName": node} if node else {"schedulerName": "kvplace"}),
            "automountServiceAccountToken": False,
            "containers": [{"name": "compute", "image": "example.test/vm"}],
        },
    }


if __name__ == "__main__":
    sys.exit(main())
