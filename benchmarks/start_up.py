"""Seconds from the start of `kvplace serve` until it is ready in a large cluster.

    python -m benchmarks.start_up [--nodes 5000] [--starts 3]

etcd and kube-apiserver are real. Nodes are of four server types, with 50 images each, their NodeTopologies,
and four bound pods on each with their claims in its NodeLedger. Pods are padded to the size of
virt-launcher's (18 KB). Rights and policies of the manifests are active. The CPU time is that of serve, and
of the API server while serve starts. Memory is what serve keeps resident when it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks._api_requests import Call, ask_all
from benchmarks._processes import cpu_seconds
from benchmarks._tables import table
from benchmarks.bound_per_second import SERVER_TYPES
from harness.control_plane.cluster import ControlPlane
from harness.kvplace_cluster.installation import MANIFESTS, Installation, Replica
from harness.kvplace_cluster.machines import node_shape, node_topology
from kvplace.core.allocator.allocate import place
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange, claim_document, claim_of
from kvplace.core.placement import Placement, PodPlacement, result_annotations
from kvplace.core.request import OnFailure, Request
from kvplace.core.scalars import Bytes, CpuId, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACED_LABEL
from kvplace.machines.server_types import read_machine

PODS_PER_NODE = 4
ASKED = Request(4, memory=Bytes(8 << 30))
_AT_ONCE = 400
_FILLER = [{"name": f"FILLER_{number}", "value": "x" * 60} for number in range(150)]
_IMAGES = [
    {"names": [f"registry.example.test/{'image' * 20}:{number}"], "sizeBytes": number} for number in range(50)
]

PODS = "/api/v1/namespaces/vms/pods"

Json = dict[str, Any]


class Machine:
    """A server type, and where its VMs lie on every node of it."""

    def __init__(self, name: str) -> None:
        self.topology = read_machine(name)
        self.placements: list[Placement] = []
        ledger = Ledger()
        for number in range(PODS_PER_NODE):
            placement = place(self.topology, free_of(self.topology, ledger), ASKED)
            assert isinstance(placement, Placement)
            self.placements.append(placement)
            ledger = ledger.after(LedgerChange((claim_of(PodUid(f"{number}"), placement),)))


async def fill(plane: ControlPlane, count: int) -> None:
    """Create nodes, topologies, pods and ledgers."""
    plane.create_namespace("vms")
    machines = [Machine(name) for name in SERVER_TYPES]
    calls = (call for number in range(count) for call in _first(machines[number % 4].topology, number))
    await _in_batches(plane, calls)
    every = [(number, own) for number in range(count) for own in range(PODS_PER_NODE)]
    await _in_batches(plane, (("POST", PODS, _pod(_pod_name(*one))) for one in every))
    uids = {pod["metadata"]["name"]: PodUid(pod["metadata"]["uid"]) for pod in _listed(plane)}
    bindings = (_binding(number, own, machines[number % 4], uids) for number, own in every)
    await _in_batches(plane, bindings)
    ledgers = (
        ("POST", "/apis/kvplace.io/v1alpha1/nodeledgers", _ledger(number, machines[number % 4], uids))
        for number in range(count)
    )
    await _in_batches(plane, ledgers)


async def _in_batches(plane: ControlPlane, calls: Iterator[Call]) -> None:
    done = 0
    while batch := list(islice(calls, _AT_ONCE)):
        await ask_all(plane, batch)
        done += len(batch)
        if done % 4000 == 0:
            print(f"{done} objects", file=sys.stderr)


def _node_name(number: int) -> NodeName:
    return NodeName(f"node-{number:05}")


def _first(topology: Topology, number: int) -> Iterator[Call]:
    name = _node_name(number)
    node = node_shape(name, topology).manifest(
        f"172.{16 + number // 60000}.{number // 250}.{number % 250 + 1}"
    )
    node.setdefault("status", {})["images"] = _IMAGES
    yield "POST", "/api/v1/nodes", node
    yield "POST", "/apis/kvplace.io/v1alpha1/nodetopologies", node_topology(name, topology)


def _pod_name(number: int, own: int) -> str:
    return f"virt-launcher-vm-{number:05}-{own}"


def _pod(name: str) -> Json:
    return {
        "metadata": {"name": name, "labels": {PLACED_LABEL: "true"}},
        "spec": {"containers": [{"name": "compute", "image": "example.test/compute", "env": _FILLER}]},
    }


def _listed(plane: ControlPlane) -> Iterator[Json]:
    page = ""
    while True:
        found = plane.request("GET", f"{PODS}?limit=500&continue={page}")
        yield from found["items"]
        page = found["metadata"].get("continue", "")
        if not page:
            return


def _binding(number: int, own: int, machine: Machine, uids: Mapping[str, PodUid]) -> Call:
    name, node = _pod_name(number, own), _node_name(number)
    topology, placement = machine.topology, machine.placements[own]
    bound = PodPlacement(uids[name], node, topology.fingerprint, OnFailure.WAIT, placement)
    annotations = result_annotations(topology, bound)
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "annotations": annotations},
        "target": {"kind": "Node", "name": node},
    }
    return "POST", f"{PODS}/{name}/binding", binding


def _ledger(number: int, machine: Machine, uids: Mapping[str, PodUid]) -> Json:
    claims: list[Claim] = []
    for own, placement in enumerate(machine.placements):
        name = _pod_name(number, own)
        claims.append(claim_of(uids[name], placement, namespace="vms", pod=name, vmi=f"vm-{number:05}-{own}"))
    owners = Ledger().after(LedgerChange(tuple(claims))).owners
    return {
        "apiVersion": "kvplace.io/v1alpha1",
        "kind": "NodeLedger",
        "metadata": {"name": _node_name(number)},
        "spec": {
            "owners": {str(CpuId(cpu)): uid for cpu, uid in owners.items()},
            "claims": {claim.uid: claim_document(claim) for claim in claims},
        },
    }


def started(plane: ControlPlane, number: int) -> list[str]:
    """Start serve once; returns a row of the table."""
    api_server = plane.server("kube-apiserver").pid
    before = cpu_seconds(api_server)
    began = time.monotonic()
    replica = Replica(plane, number, plane.issue_certificate("kvplace-serve"))
    try:
        replica.wait_until_ready()
        took = time.monotonic() - began
        pid = replica.process.pid
        status = Path(f"/proc/{pid}/status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return [
            f"{number}",
            f"{took:.1f}",
            f"{cpu_seconds(pid):.1f}",
            f"{cpu_seconds(api_server) - before:.1f}",
            f"{resident / 1024:.0f} MB",
        ]
    finally:
        replica.stop()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--starts", type=int, default=3)
    chosen = parser.parse_args(arguments)
    with ControlPlane() as plane:
        plane.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "crd"))
        asyncio.run(fill(plane, chosen.nodes))  # before the policies, which let no other client write results
        with Installation(plane, replicas=0, webhooks=False, admission=lambda _: ""):
            rows = [started(plane, number) for number in range(1, chosen.starts + 1)]
    columns = ["start", "seconds to ready", "CPU seconds of serve", "of the API server", "memory"]
    print(f"{chosen.nodes} nodes, {chosen.nodes * PODS_PER_NODE} pods")
    print(table(columns, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
