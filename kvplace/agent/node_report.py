"""The agent's report about its node: filled in by its components, published by one of them.

`NodeReport` holds the report. The functions below it make the published documents from it; they are pure. A
description that a person has written stays in effect: the agent then reports only where it contradicts the
machine.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xxhash import xxh64_hexdigest, xxh64_intdigest

from kvplace.agent.metrics import ENFORCES
from kvplace.agent.this_machine import ThisMachine
from kvplace.core.cpu_map import read_node_cpu_map, write_cpu_map
from kvplace.core.cpuset import cpus_of, format_cpu_list, union
from kvplace.core.errors import BadAnnotation
from kvplace.core.free_resources import CpuUsage, MemoryInUse, free_of, usage_of
from kvplace.core.ledger import Ledger
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement, resource_topology
from kvplace.core.scalars import CpuMask, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.object_records import Condition, PodReport, TopologyRecord


class NodeReport:
    """The status of the node's NodeTopology as its components fill it in.

    A value that is equal to the one it replaces changes nothing and costs no write. Until all is known, the
    status of an earlier agent stays: a pod that is missing from the status has ended, and `serve` gives its
    CPUs to others.
    """

    def __init__(self) -> None:
        self.pods: dict[PodUid, PodReport] = {}
        """The entries of `status.pods`, by UID."""
        self.conditions: dict[str, Condition] = {}
        """The conditions by their type."""
        self.enforcement: Enforcement | None = None
        """How other containers are kept off owned CPUs; None until the containers of the node are known."""
        self.is_complete = False
        """Whether every pod with a claim that runs here has an entry."""
        self.in_use: MemoryInUse | None = None
        """The memory in use outside of VMs with claims; None until it has been measured."""
        self.devices: DeviceReport | None = None
        """The devices of the node; None while they are unknown."""
        self.devices_unknown: str | None = None
        """Why the devices are unknown, empty where they are known; None before the first read."""
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call the listener after each change."""
        self._listeners.append(listener)

    def put_pod(self, report: PodReport) -> None:
        """Set the entry of a pod."""
        if self.pods.get(report.uid) != report:
            self.pods[report.uid] = report
            self._notify()

    def drop_pod(self, uid: PodUid) -> None:
        """Remove the entry of a pod that is gone."""
        if self.pods.pop(uid, None) is not None:
            self._notify()

    def complete(self) -> None:
        """Note that every pod has been checked since the containers of the node are known."""
        self._set(is_complete=True)

    def put_condition(self, condition: Condition) -> None:
        """Set the condition of that type."""
        if self.conditions.get(condition.type) != condition:
            self.conditions[condition.type] = condition
            self._notify()

    def drop_condition(self, kind: str) -> None:
        """Remove a condition that has no meaning any more."""
        if self.conditions.pop(kind, None) is not None:
            self._notify()

    def use_memory(self, in_use: MemoryInUse) -> None:
        """Set the memory in use outside of VMs with claims."""
        self._set(in_use=in_use)

    def use_devices(self, devices: DeviceReport | None, unknown: str = "") -> None:
        """Set the devices of the node, or why they are unknown."""
        self._set(devices=devices, devices_unknown=unknown)

    def enforce(self, how: Enforcement) -> None:
        """State how other containers are kept off owned CPUs from now on; NONE while nothing does."""
        ENFORCES.set(how is not Enforcement.NONE)
        self._set(enforcement=how)

    def _set(self, **values: object) -> None:
        if any(getattr(self, name) != value for name, value in values.items()):
            vars(self).update(values)
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


@dataclass(frozen=True, slots=True)
class Description:
    """The machine that counts for placing: the one found, or the one that a person has written."""

    topology: Topology
    by_hand: bool = False
    problem: str = ""
    """Contradictions between a description by hand and the machine."""


def describe(machine: ThisMachine, by_hand: TopologyRecord | None) -> Description:
    """Choose the description: the one that an operator has written, else the machine itself."""
    if by_hand is None:
        return Description(machine.topology)
    if by_hand.topology is None:
        return Description(machine.topology, by_hand=True, problem=f"it cannot be read: {by_hand.problem}")
    absent = by_hand.topology.allocatable & ~machine.topology.cpus
    problem = f"it gives out CPU {format_cpu_list(absent)}, which is not online" if absent else ""
    return Description(by_hand.topology, by_hand=True, problem=problem)


def cpu_map_text(machine: ThisMachine, description: Description) -> str | None:
    """Write the CPUs that may be given out, by socket; None when there are none."""
    topology = _given_out(machine, description)
    return write_cpu_map(topology, tuple(cpus_of(topology.allocatable))) if topology.allocatable else None


def resource_topology_document(
    machine: ThisMachine,
    description: Description,
    ledger: Ledger,
    running: Iterable[tuple[str, str]],
    devices: DeviceReport | None = None,
) -> Mapping[str, Any]:
    """Write the NodeResourceTopology; `running` are the node's running pods as (namespace, name)."""
    return resource_topology(
        description.topology,
        free_of(_given_out(machine, description), ledger),
        pod_fingerprint(running),
        machine.kubelet.topology,
        () if devices is None else devices.devices.counts,
    )


def cpu_usage(
    machine: ThisMachine, description: Description, ledger: Ledger, enforcement: Enforcement, cpu_map: str
) -> CpuUsage | None:
    """Count how the CPUs are used, free as the scheduler sees it; None while the `cpu-map` cannot be read."""
    topology = _given_out(machine, description)
    try:
        if cpu_map:
            topology = topology.giving_out(union(read_node_cpu_map(cpu_map).values()))
    except BadAnnotation:
        return None
    free = free_of(topology, ledger, pools_shrink=enforcement is not Enforcement.NONE)
    return usage_of(topology, ledger, free.cpus)


def _given_out(machine: ThisMachine, description: Description) -> Topology:
    """The described machine with the CPUs that may be given out."""
    return description.topology.giving_out(CpuMask(machine.topology.cpus & ~machine.kubelet_cpus.held))


_PREFIX = "pfp0v001"


def pod_fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Compute the fingerprint of pods, given as (namespace, name) in any order."""
    hashes = sorted(_pod_hash(namespace, name) for namespace, name in pods)
    return _PREFIX + xxh64_hexdigest(struct.pack(f"<{len(hashes)}Q", *hashes))


def _pod_hash(namespace: str, name: str) -> int:
    return xxh64_intdigest(name.encode(), xxh64_intdigest(namespace.encode()))
