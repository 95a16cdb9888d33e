"""A cluster with VMs on its nodes for tests of the map, and the map before it.

The VMs are placed by the production allocator on machines of real types; the reports of agents report that
they are pinned, but where a test has one drift.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvplace.core.allocator.allocate import try_place
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Claim, LedgerChange, claim_of
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import PodPlacement
from kvplace.core.request import OnFailure, PinningOptions, Policy, Request, Scope
from kvplace.core.request_json import request_document
from kvplace.core.scalars import Bytes, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PINNED
from kvplace.kube.object_records import Condition, PodReport
from kvplace.web.application import MapSettings, web_map
from tests.kube.faulty_cluster import FaultyCluster

SIZES = (4, 8, 2, 16, 4, 6, 2, 8)
"""vCPUs of the VMs that fill a node, one after the other."""
SINCE = "2026-11-22T08:00:00Z"


@dataclass(frozen=True)
class Vm:
    """A VM that runs in the stage."""

    namespace: str
    name: str
    node: NodeName
    claim: Claim
    placement: PodPlacement

    @property
    def uid(self) -> PodUid:
        return self.claim.uid


class StagedCluster:
    """A cluster in memory, and what happens in it."""

    def __init__(self) -> None:
        self.cluster = FaultyCluster()
        self.vms: dict[str, Vm] = {}
        self._machines: dict[str, Topology] = {}
        self.devices: dict[str, DeviceReport] = {}
        """The agents' reports of devices, by node."""
        self._with_agents: set[str] = set()
        """Nodes with played pods of agents, too."""
        self._numbers = itertools.count(1)

    def machine(self, node: str) -> Topology:
        """Return what a node is made of."""
        return self._machines[node]

    def add_node(self, name: str, machine: Topology) -> None:
        self._machines[name] = machine
        self.cluster.create_node(name, topology=machine)

    async def run_vm(
        self,
        node: str,
        vcpus: int,
        *,
        name: str = "",
        namespace: str = "shop",
        options: PinningOptions | None = None,
    ) -> Vm | None:
        """Claim cores for a VM and bind its pod; None when it does not fit on the node."""
        machine = self._machines[node]
        record = await self.cluster.create_ledger(NodeName(node))
        request = Request(
            vcpus=vcpus,
            options=options or PinningOptions(scope=Scope.ANY),
            memory=Bytes(vcpus << 30),
        )
        placed = try_place(machine, free_of(machine, record.ledger), request)
        if placed is None:
            return None
        name = name or f"vm-{next(self._numbers)}"
        pod = f"virt-launcher-{name}"
        uid = PodUid(f"uid-{namespace}-{name}-{node}")
        bound = PodPlacement(uid, NodeName(node), machine.fingerprint, OnFailure.WAIT, placed)
        claim = claim_of(uid, placed, namespace=namespace, pod=pod, vmi=name, since=SINCE)
        self.cluster.create_pod(
            pod,
            namespace=namespace,
            uid=uid,
            vmi=name,
            node=node,
            request=_text(request),
            annotations={"kvplace.io/placement": bound.to_json()},
        )
        self.cluster.change_pod(namespace, pod, phase="Running")
        await self.cluster.write_ledger(record, LedgerChange((claim,)))
        vm = Vm(namespace, name, NodeName(node), claim, bound)
        self.vms[f"{namespace}/{name}"] = vm
        await self.report(node)
        return vm

    async def end_vm(self, vm: Vm) -> None:
        """Delete the pod of a VM and release its claim."""
        self.cluster.delete_pod(vm.namespace, f"virt-launcher-{vm.name}", force=True)
        record = await self.cluster.read_ledger(vm.node)
        assert record is not None
        await self.cluster.write_ledger(record, LedgerChange(releases=(vm.uid,)))
        del self.vms[f"{vm.namespace}/{vm.name}"]
        await self.report(vm.node)

    async def fill(self, node: str, share: float) -> None:
        """Run VMs of mixed sizes, and take every fourth away again, as happens in a long life."""
        machine = self._machines[node]
        wanted = int(machine.allocatable.bit_count() * share)
        used = 0
        for number, vcpus in enumerate(itertools.cycle(SIZES)):
            policy = Policy.SHARE if number % 7 == 6 else Policy.EXCLUSIVE
            options = PinningOptions(scope=Scope.ANY, policy=policy)
            vm = await self.run_vm(node, vcpus, options=options)
            if vm is None or (used := used + vcpus) >= wanted:
                break
        for vm in [one for one in self.vms.values() if one.node == node][1::4]:
            await self.end_vm(vm)

    async def lose_agent(self, node: str) -> None:
        """Take the agent away from a node that it has described."""
        self._with_agents.add(node)
        self.cluster.delete_agent_pod(node)
        await self.report(node)

    async def report(
        self, node: str, drifted: Mapping[PodUid, CpuMask] | None = None, *, sentence: str = ""
    ) -> None:
        """Have the agent of a node report about its VMs; `drifted` ones run elsewhere."""
        reports = []
        for vm in self.vms.values():
            if vm.node != node:
                continue
            cpus = (drifted or {}).get(vm.uid)
            pod = f"virt-launcher-{vm.name}"
            reports.append(
                PodReport(
                    vm.uid,
                    vm.namespace,
                    pod,
                    revision=1,
                    pinned=cpus is None,
                    running=True,
                    cpus=vm.claim.cpus if cpus is None else cpus,
                    drift="" if cpus is None else sentence,
                )
            )
            record = await self.cluster.read_pod(vm.namespace, pod)
            assert record is not None
            told = Condition(PINNED, cpus is None, "AsPlaced" if cpus is None else "Drift", sentence)
            if record.condition(PINNED) != told:
                await self.cluster.set_pod_condition(record, told)
        self.cluster.put_topology(
            node,
            self._machines[node],
            enforcement=Enforcement.NRI,
            pods=reports,
            by_agent=node in self._with_agents,
            devices=self.devices.get(node),
        )


async def cluster_of(machine: Topology, nodes: int, share: float = 0.7) -> StagedCluster:
    """Make a cluster of equal nodes; each of them is full to another degree around `share`."""
    stage = StagedCluster()
    for number in range(nodes):
        stage.add_node(f"worker-{number}", machine)
        await stage.fill(f"worker-{number}", max(0.0, min(1.0, share + (number % 5 - 2) * 0.15)))
    return stage


@contextlib.asynccontextmanager
async def mapped(stage: StagedCluster, **changed: Any) -> AsyncIterator[str]:
    """Serve the map of a stage, perhaps with changed settings, while the block runs; gives its URL."""
    async with web_map(stage.cluster, MapSettings(**{"cluster_name": "rack-7", **changed})) as url:
        yield url


def _text(request: Request) -> str:
    return json.dumps({"version": 1, **request_document(request)})
