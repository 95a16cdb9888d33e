"""The documents that the agent publishes about its node, as a function of its state; pure.

A description that a person has written stays in effect, and the conditions report it: the agent then only
reports where it contradicts the machine.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from xxhash import xxh64_hexdigest, xxh64_intdigest

from kvplace.agent.conditions import TopologyCondition, TopologyReason
from kvplace.agent.this_machine import ThisMachine
from kvplace.core.cpu_map import read_node_cpu_map, write_cpu_map
from kvplace.core.cpuset import cpus_of, format_cpu_list, union
from kvplace.core.errors import BadAnnotation
from kvplace.core.free_resources import CpuUsage, free_of, usage_of
from kvplace.core.ledger import Ledger
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement, resource_topology
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.core.topology import Topology
from kvplace.kube.object_records import Condition, TopologyRecord


class WrittenBy(Enum):
    """The last writer of an object, or of a field, of this node."""

    UNKNOWN = "unknown"
    AGENT = "the agent"
    PERSON = "a person"


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
    cpus = _given_out(machine, description)
    return write_cpu_map(description.topology, tuple(cpus_of(cpus))) if cpus else None


def resource_topology_document(
    machine: ThisMachine,
    description: Description,
    ledger: Ledger,
    running: Iterable[tuple[str, str]],
    devices: DeviceReport | None = None,
) -> Mapping[str, Any]:
    """Write the NodeResourceTopology; `running` are the node's running pods as (namespace, name)."""
    free = free_of(description.topology, ledger, only=_given_out(machine, description))
    return resource_topology(
        description.topology,
        free,
        pod_fingerprint(running),
        machine.kubelet.topology,
        () if devices is None else devices.devices.counts,
    )


def cpu_usage(
    machine: ThisMachine, description: Description, ledger: Ledger, enforcement: Enforcement, cpu_map: str
) -> CpuUsage | None:
    """Count how the CPUs are used, free as the scheduler sees it; None while the `cpu-map` cannot be read."""
    topology, only = description.topology, _given_out(machine, description)
    try:
        only &= union(read_node_cpu_map(cpu_map).values()) if cpu_map else only
    except BadAnnotation:
        return None
    free = free_of(topology, ledger, only=only, pools_shrink=enforcement is not Enforcement.NONE)
    return usage_of(topology, only, ledger, free.cpus)


def _given_out(machine: ThisMachine, description: Description) -> CpuMask:
    """The CPUs that may be given out."""
    return description.topology.allocatable & machine.topology.cpus & ~machine.kubelet_cpus.held


def own_conditions(
    machine: ThisMachine, description: Description, cpu_map_by: WrittenBy, resources_by: WrittenBy
) -> tuple[Condition, ...]:
    """State the origin of the description, and the CPUs that the kubelet holds."""
    return (_described(machine, description, cpu_map_by, resources_by), _kubelet_state(machine))


def devices_known(devices: DeviceReport | None, why_not: str) -> Condition:
    """State whether the devices are known; `ready` does not need them."""
    if devices is None:
        return Condition(
            TopologyCondition.DEVICES_KNOWN,
            False,
            TopologyReason.DEVICES_UNKNOWN,
            f"no devices are known here: {why_not or 'the kubelet has not been asked yet'}",
        )
    resources = sorted({one.resource for one in devices.devices.counts})
    return Condition(
        TopologyCondition.DEVICES_KNOWN,
        True,
        TopologyReason.DEVICES_REPORTED,
        f"the kubelet reports devices of {', '.join(resources[:20])}"
        if resources
        else "the node has no devices",
    )


def ready(conditions: Iterable[Condition], enforcement: Enforcement, machine: ThisMachine) -> Condition:
    """Sum up: not ready while any other condition is not True, or while nothing is enforced."""
    bad = [condition for condition in conditions if condition.status is not True]
    if bad:
        sentences = "; ".join(f"{condition.type}: {condition.message}" for condition in bad)
        return Condition(TopologyCondition.READY, False, bad[0].reason, sentences)
    if machine.kubelet_cpus.observes_only:
        return Condition(
            TopologyCondition.READY,
            True,
            TopologyReason.OBSERVING,
            "the kubelet sets cpusets here by its static policy",
        )
    if enforcement is Enforcement.NONE:
        return Condition(
            TopologyCondition.READY,
            False,
            TopologyReason.NOT_ENFORCED,
            "containers are not kept off the CPUs that VMs own",
        )
    if enforcement is Enforcement.DRA:
        return Condition(
            TopologyCondition.READY,
            True,
            TopologyReason.OBSERVING,
            "dra-driver-cpu sets cpusets here by the ResourceClaims of pods (enforcement dra, experimental)",
        )
    return Condition(
        TopologyCondition.READY,
        True,
        TopologyReason.ENFORCING,
        "containers are kept off the CPUs that VMs own",
    )


def _described(
    machine: ThisMachine, description: Description, cpu_map_by: WrittenBy, resources_by: WrittenBy
) -> Condition:
    by_hand = [
        name
        for name, is_it in (
            ("the NodeTopology", description.by_hand),
            ("the node's cpu-map", cpu_map_by is WrittenBy.PERSON),
            ("the NodeResourceTopology", resources_by is WrittenBy.PERSON),
        )
        if is_it
    ]
    if description.problem:
        return Condition(
            TopologyCondition.DESCRIBED,
            False,
            TopologyReason.CONTRADICTS_MACHINE,
            f"the NodeTopology was written by hand and stays in effect, but {description.problem};"
            " delete it to have the agent write it",
        )
    reserved = machine.topology.reserved
    found = f"CPU {format_cpu_list(reserved)} is reserved: {machine.reserved_by.value}"
    notes = "; ".join((found, *machine.notes))
    if by_hand:
        return Condition(
            TopologyCondition.DESCRIBED,
            True,
            TopologyReason.WRITTEN_BY_HAND,
            f"{' and '.join(by_hand)} was written by another than the agent and stays in effect;"
            f" delete it to have the agent write it. Found: {notes}",
        )
    return Condition(TopologyCondition.DESCRIBED, True, TopologyReason.DISCOVERED, notes)


def _kubelet_state(machine: ThisMachine) -> Condition:
    held = machine.kubelet_cpus
    if held.problem:
        return Condition(
            TopologyCondition.KUBELET_STATE, False, TopologyReason.STATE_UNREADABLE, held.problem
        )
    if held.observes_only:
        cpus = format_cpu_list(held.held) if held.held != NO_CPUS else "none"
        return Condition(
            TopologyCondition.KUBELET_STATE,
            True,
            TopologyReason.STATIC_POLICY,
            f"the kubelet's static policy is in effect; its CPUs: {cpus}",
        )
    return Condition(
        TopologyCondition.KUBELET_STATE,
        True,
        TopologyReason.NO_STATIC_POLICY,
        "the kubelet gives no CPUs to containers",
    )


_PREFIX = "pfp0v001"


def pod_fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Compute the fingerprint of pods, given as (namespace, name) in any order."""
    hashes = sorted(_pod_hash(namespace, name) for namespace, name in pods)
    return _PREFIX + xxh64_hexdigest(struct.pack(f"<{len(hashes)}Q", *hashes))


def _pod_hash(namespace: str, name: str) -> int:
    return xxh64_intdigest(name.encode(), xxh64_intdigest(namespace.encode()))
