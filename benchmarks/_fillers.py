"""Nodes that are nearly full: one bound pod on each, which stands for all VMs that run there.

Its claim owns what VMs of mixed sizes would own that came one after the other, and it asks kube-scheduler
for as many CPUs. So ledgers have as many owners as in a full cluster, and free CPUs lie where they lie there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from benchmarks._api_requests import Call, ask_all
from harness.control_plane.cluster import ControlPlane
from kvplace.core.allocator.allocate import try_place
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange, claim_document, claim_of
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import Bytes, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology

NAMESPACE = "running"
_PATTERNS = 8
"""Ways of filling machines of one type."""
_VCPUS = (2, 2, 2, 4, 4, 4, 8, 8, 16)

Json = dict[str, Any]


def fill(plane: ControlPlane, machines: Mapping[str, Topology], share: float, *, ledgers: bool) -> None:
    """Fill nodes up to a share of their CPUs, in their ledgers, too, where kvplace runs."""
    plane.create_namespace(NAMESPACE)
    chance = random.Random(2)
    patterns = {
        machine.fingerprint: [_occupied(machine, share, chance) for _ in range(_PATTERNS)]
        for machine in set(machines.values())
    }
    taken = {
        name: patterns[machine.fingerprint][number % _PATTERNS]
        for number, (name, machine) in enumerate(machines.items())
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    pods: list[Call] = [("POST", path, _pod(name, owned)) for name, owned in taken.items()]
    asyncio.run(ask_all(plane, pods))
    if not ledgers:
        return
    made = plane.request("GET", path)["items"]
    uids = {pod["spec"]["nodeName"]: PodUid(pod["metadata"]["uid"]) for pod in made}
    ledger_path = "/apis/kvplace.io/v1alpha1/nodeledgers"
    # Those of earlier pods are empty by now.
    asyncio.run(ask_all(plane, [("DELETE", f"{ledger_path}/{name}", None) for name in taken]))
    documents = [_ledger(NodeName(name), uids[name], owned) for name, owned in taken.items()]
    asyncio.run(ask_all(plane, [("POST", ledger_path, document) for document in documents]))


def _occupied(machine: Topology, share: float, chance: random.Random) -> CpuMask:
    """Return the CPUs that VMs own which came one after the other and take this share of a machine."""
    ledger = Ledger()
    wanted = int(machine.allocatable.bit_count() * share)
    number = 0
    while (left := wanted - ledger.owned.bit_count()) > 0:
        number += 1
        vcpus = min(chance.choice(_VCPUS), left)
        request = Request(vcpus, PinningOptions(scope=Scope.ONE_NUMA), Bytes(0), {}, 0)
        placement = try_place(machine, free_of(machine, ledger), request)
        if placement is None:
            break
        ledger = ledger.after(LedgerChange(claims=(claim_of(PodUid(f"vm-{number}"), placement),)))
        if chance.random() < 0.3:  # some have ended since
            gone = chance.choice(sorted(ledger.claims))
            ledger = ledger.after(LedgerChange(releases=(gone,)))
    return ledger.owned


def _pod(node: str, owned: CpuMask) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"vms-of-{node}", "labels": {"kvplace.io/placed": "true"}},
        "spec": {
            "nodeName": node,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "main",
                    "image": "example.test/vm",
                    "resources": {"requests": {"cpu": str(owned.bit_count())}},
                }
            ],
        },
    }


def _ledger(node: NodeName, uid: PodUid, owned: CpuMask) -> Json:
    claim = Claim(
        uid=uid,
        namespace=NAMESPACE,
        pod=f"vms-of-{node}",
        vmi="",
        policy=PinningOptions().policy,
        cpus=owned,
        owned=owned,
        memory={},
        huge_pages={},
        since="2026-01-01T00:00:00Z",
    )
    return {
        "apiVersion": "kvplace.io/v1alpha1",
        "kind": "NodeLedger",
        "metadata": {"name": node},
        "spec": {
            "owners": {str(cpu): uid for cpu in cpus_of(owned)},
            "claims": {uid: claim_document(claim)},
        },
    }
