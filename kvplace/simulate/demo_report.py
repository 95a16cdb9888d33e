"""The result of a demo: its VMs, counts over them, and the JSON report."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplace.core.drawing.core_map import CoreMap, draw
from kvplace.core.drawing.core_map_json import core_map_document
from kvplace.core.ledger import Ledger
from kvplace.core.node_topology import API_VERSION
from kvplace.core.placement import Placement
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.topology import Topology
from kvplace.core.vm_stages import Percentiles
from kvplace.domainxml.document import parse

KIND = "DemoReport"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """How large the demo is; equal settings give equal placements."""

    vms: int = 500
    nodes: int = 24
    seed: int = 1


@dataclass(frozen=True, slots=True)
class PlacedVm:
    """A VM that was bound, pinned or (with `on-failure: float`) unpinned."""

    name: str
    node: NodeName
    placement: Placement
    seconds: float
    """From the VM's creation to its rewritten domain."""
    deciding_seconds: float
    """The part of filter and prioritize, which choose its node and cores."""
    domain_before: bytes
    domain_after: bytes


@dataclass(frozen=True, slots=True)
class DemoRefusal:
    """A refused VM: the component that refused it, and the message for its user."""

    name: str
    by: str
    reason: str


@dataclass
class DemoReport:
    """The VMs of a demo."""

    settings: DemoSettings
    machines: Mapping[NodeName, Topology]
    """By the name of the node."""
    placed: list[PlacedVm] = field(default_factory=list)
    refused: list[DemoRefusal] = field(default_factory=list)
    ledgers: Mapping[NodeName, Ledger] = field(default_factory=dict)
    seconds: float = 0.0

    def order_by(self, names: Sequence[str]) -> None:
        """Put the VMs in this order of their names, not in the order of their binds."""
        place = {name: number for number, name in enumerate(names)}
        self.placed.sort(key=lambda vm: place[vm.name])
        self.refused.sort(key=lambda vm: place[vm.name])

    @property
    def done(self) -> int:
        """How many VMs were placed or refused."""
        return len(self.placed) + len(self.refused)

    @property
    def pinned(self) -> list[PlacedVm]:
        """The placed VMs that do not run unpinned."""
        return [vm for vm in self.placed if not vm.placement.floats]

    @property
    def numa_splits(self) -> Mapping[int, int]:
        """How many pinned VMs have their CPUs on one, two and more NUMA nodes."""
        return self._spread(lambda topology, cpus: len(topology.nodes_of(cpus)))

    @property
    def socket_splits(self) -> Mapping[int, int]:
        """How many pinned VMs have their CPUs on one, two and more sockets."""
        return self._spread(lambda topology, cpus: len(topology.packages_of(cpus)))

    @property
    def owned_cpus(self) -> int:
        """CPUs that have an owner, counted from the placements of the pods, not from the ledgers."""
        return sum(vm.placement.owned.bit_count() for vm in self.placed)

    @property
    def cpus_owned_twice(self) -> int:
        """CPUs that two pods own, or one pod and the host; anything but 0 is a bug."""
        used: dict[NodeName, CpuMask] = {node: topology.reserved for node, topology in self.machines.items()}
        twice = 0
        for vm in self.placed:
            twice += (used[vm.node] & vm.placement.owned).bit_count()
            used[vm.node] |= vm.placement.owned
        return twice

    @property
    def allocatable_cpus(self) -> int:
        """CPUs of all machines that are not reserved."""
        return sum(topology.allocatable.bit_count() for topology in self.machines.values())

    def core_map(self) -> CoreMap:
        """Draw the machine with several NUMA nodes that has most owners."""
        node = max(
            self.machines,
            key=lambda name: (
                len(self.machines[name].numa_nodes) > 1,
                len(set(self.ledgers[name].owners.values())),
                name,
            ),
        )
        ledger = self.ledgers[node]
        given = {vm.name: vm.placement for vm in self.pinned}
        placements = {uid: given[claim.vmi] for uid, claim in ledger.claims.items() if claim.vmi in given}
        return draw(node, self.machines[node], ledger, placements=placements)

    def example(self, node: str) -> PlacedVm | None:
        """Pick a VM with a domain that shows much: one that owns CPUs, if possible on that node."""
        return max(
            self.pinned,
            key=lambda vm: (vm.name.startswith("network-function"), vm.node == node, vm.placement.owned != 0),
            default=None,
        )

    def _spread(self, count: Callable[[Topology, CpuMask], int]) -> Mapping[int, int]:
        spread = Counter(count(self.machines[vm.node], vm.placement.cpus) for vm in self.pinned)
        return dict(sorted(spread.items()))


@dataclass(frozen=True, slots=True)
class SimilarRefusals:
    """VMs with refusals that differ in numbers only."""

    by: str
    reason: str
    """The message to the first of them."""
    vms: tuple[str, ...]


def similar_refusals(report: DemoReport) -> list[SimilarRefusals]:
    """Group refusals that differ in their numbers only, the largest group first."""
    groups: dict[tuple[str, str], list[DemoRefusal]] = {}
    for vm in report.refused:
        first = vm.reason.replace(vm.name, "").partition(", best ")[0]
        groups.setdefault((vm.by, re.sub(r"\d+", "0", first)), []).append(vm)
    ordered = sorted(groups.values(), key=lambda vms: (-len(vms), vms[0].name))
    return [SimilarRefusals(vms[0].by, vms[0].reason, tuple(vm.name for vm in vms)) for vms in ordered]


def domain_diff(vm: PlacedVm) -> list[str]:
    """Give the changes to a domain as a unified diff without newlines.

    An empty element can be written in two ways; that alone is not a change.
    """
    return list(
        difflib.unified_diff(
            parse(vm.domain_before).to_bytes().decode().splitlines(),
            vm.domain_after.decode().splitlines(),
            "domain from virt-launcher",
            f"domain of {vm.name} on {vm.node}",
            n=2,
            lineterm="",
        )
    )


def report_document(report: DemoReport) -> dict[str, Any]:
    """Write a report as JSON; everything but the seconds is the same for equal settings."""
    drawing = report.core_map()
    example = report.example(drawing.name)
    whole = Percentiles.of([vm.seconds for vm in report.placed])
    deciding = Percentiles.of([vm.deciding_seconds for vm in report.placed])
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "settings": {
            "vms": report.settings.vms,
            "nodes": report.settings.nodes,
            "seed": report.settings.seed,
        },
        **({"interrupted": "not all VMs were tried"} if report.done < report.settings.vms else {}),
        "placed": len(report.placed),
        "pinned": len(report.pinned),
        "refused": [
            {"by": group.by, "count": len(group.vms), "reason": group.reason, "vms": list(group.vms)}
            for group in similar_refusals(report)
        ],
        "vmsByNumaNodes": {str(nodes): count for nodes, count in report.numa_splits.items()},
        "vmsBySockets": {str(sockets): count for sockets, count in report.socket_splits.items()},
        "cpus": {
            "allocatable": report.allocatable_cpus,
            "owned": report.owned_cpus,
            "ownedTwice": report.cpus_owned_twice,
        },
        "seconds": {
            "all": report.seconds,
            "perVm": {"p50": whole.p50, "p95": whole.p95, "max": whole.max},
            "deciding": {"p50": deciding.p50, "p95": deciding.p95, "max": deciding.max},
        },
        "map": core_map_document(drawing),
        "domain": None if example is None else _domain_document(example),
        "vms": [_vm_document(report, vm) for vm in report.placed],
    }


def _vm_document(report: DemoReport, vm: PlacedVm) -> dict[str, Any]:
    return {
        "name": vm.name,
        "node": vm.node,
        "vcpus": list(vm.placement.vcpus),
        "numaNodes": list(report.machines[vm.node].nodes_of(vm.placement.cpus)),
    }


def _domain_document(vm: PlacedVm) -> dict[str, Any]:
    return {
        "vm": vm.name,
        "node": vm.node,
        "before": vm.domain_before.decode(),
        "after": vm.domain_after.decode(),
    }
