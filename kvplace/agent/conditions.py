"""The conditions that the agent reports: every type and every reason, and the conditions of the NodeTopology.

The pages docs/agent.md and docs/troubleshoot.md give an action for each reason; tests compare them with these
enums. `kvplace.io/Pinned` is a condition of pods (`verification`), all others are conditions of the
NodeTopology.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kvplace.agent.node_report import Description
from kvplace.agent.this_machine import KubeletCpus, ThisMachine
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.well_known_names import NO_LONGER_RUNNING, TOPOLOGY_READY
from kvplace.kube.object_records import Condition


class TopologyCondition(StrEnum):
    """Types of the conditions of a NodeTopology."""

    READY = TOPOLOGY_READY
    """The sum of the others."""
    DESCRIBED = "Described"
    KUBELET_STATE = "KubeletState"
    CPUSETS_ENFORCED = "CpusetsEnforced"
    """Whether every container has the cpuset that was decided for it."""
    DEVICES_KNOWN = "DevicesKnown"
    """Not part of the sum: VMs without devices need nothing of it."""


class TopologyReason(StrEnum):
    """Reasons of the conditions of a NodeTopology."""

    ENFORCING = "Enforcing"
    OBSERVING = "Observing"
    NOT_ENFORCED = "NotEnforced"

    DISCOVERED = "Discovered"
    WRITTEN_BY_HAND = "WrittenByHand"
    CONTRADICTS_MACHINE = "ContradictsMachine"

    NO_STATIC_POLICY = "NoStaticPolicy"
    STATIC_POLICY = "StaticPolicy"
    STATE_UNREADABLE = "StateUnreadable"

    CONNECTED = "Connected"
    """To the container runtime by NRI."""
    CGROUPS_SET = "CgroupsSet"
    """Without NRI."""
    RUNTIME_UNAVAILABLE = "RuntimeUnavailable"
    REPAIRS_UNDONE = "RepairsUndone"
    CGROUPS_NOT_SET = "CgroupsNotSet"
    CHANGES_NOT_REPORTED = "ChangesNotReported"
    NO_CPUSETS = "NoCpusets"

    DEVICES_REPORTED = "DevicesReported"
    DEVICES_UNKNOWN = "DevicesUnknown"


class PinnedReason(StrEnum):
    """Reasons of the condition `kvplace.io/Pinned`."""

    AS_PLACED = "AsPlaced"
    """The only reason with the status True."""
    FLOATS = "Floats"

    THREADS_ELSEWHERE = "ThreadsElsewhere"
    VCPU_MISSING = "VcpuMissing"
    CPUSET_DIFFERS = "CpusetDiffers"
    MEMORY_ELSEWHERE = "MemoryElsewhere"
    REPAIRS_UNDONE = "RepairsUndone"
    NOT_MEASURED = "NotMeasured"
    NOT_RUNNING = NO_LONGER_RUNNING

    CPUS_OFFLINE = "CpusOffline"
    CPUS_IN_USE = "CpusInUse"
    KUBELET_OWNS_CPUS = "KubeletOwnsCpus"
    OWNED_BY_ANOTHER_POD = "OwnedByAnotherPod"
    NO_SHARED_POOL = "NoSharedPool"


def cpusets_enforced(reason: TopologyReason, message: str, *, status: bool = False) -> Condition:
    """Return the condition about cpusets."""
    return Condition(TopologyCondition.CPUSETS_ENFORCED, status, reason, message)


def described(
    machine: ThisMachine, description: Description, *, cpu_map_by_hand: bool, resources_by_hand: bool
) -> Condition:
    """State the origin of the description, and where it contradicts the machine."""
    kind = TopologyCondition.DESCRIBED
    if description.problem:
        return Condition(
            kind,
            False,
            TopologyReason.CONTRADICTS_MACHINE,
            f"the NodeTopology was written by hand and stays in effect, but {description.problem};"
            " delete it to have the agent write it",
        )
    by_hand = [
        name
        for name, is_by_hand in (
            ("the NodeTopology", description.by_hand),
            ("the node's cpu-map", cpu_map_by_hand),
            ("the NodeResourceTopology", resources_by_hand),
        )
        if is_by_hand
    ]
    reserved = f"CPU {format_cpu_list(machine.topology.reserved)} is reserved: {machine.reserved_by.value}"
    notes = "; ".join((reserved, *machine.notes))
    if not by_hand:
        return Condition(kind, True, TopologyReason.DISCOVERED, notes)
    return Condition(
        kind,
        True,
        TopologyReason.WRITTEN_BY_HAND,
        f"{' and '.join(by_hand)} was written by another than the agent and stays in effect;"
        f" delete it to have the agent write it. Found: {notes}",
    )


def kubelet_state(kubelet: KubeletCpus) -> Condition:
    """State the CPUs that the kubelet holds."""
    if kubelet.problem:
        status, reason, message = False, TopologyReason.STATE_UNREADABLE, kubelet.problem
    elif kubelet.observes_only:
        status, reason = True, TopologyReason.STATIC_POLICY
        held = format_cpu_list(kubelet.held) or "none"
        message = f"the kubelet's static policy is in effect; its CPUs: {held}"
    else:
        status, reason = True, TopologyReason.NO_STATIC_POLICY
        message = "the kubelet gives no CPUs to containers"
    return Condition(TopologyCondition.KUBELET_STATE, status, reason, message)


def devices_known(devices: DeviceReport | None, why_not: str) -> Condition:
    """State whether the devices are known; `ready` does not need them."""
    kind = TopologyCondition.DEVICES_KNOWN
    if devices is None:
        message = f"no devices are known here: {why_not or 'the kubelet has not been asked yet'}"
        return Condition(kind, False, TopologyReason.DEVICES_UNKNOWN, message)
    resources = sorted({one.resource for one in devices.devices.counts})
    message = f"the kubelet reports devices of {', '.join(resources[:20])}"
    return Condition(
        kind, True, TopologyReason.DEVICES_REPORTED, message if resources else "the node has no devices"
    )


def ready(conditions: Iterable[Condition], enforcement: Enforcement, kubelet: KubeletCpus) -> Condition:
    """Sum up: not ready while any other condition is not True, or while nothing is enforced."""
    bad = [condition for condition in conditions if condition.status is not True]
    if bad:
        sentences = "; ".join(f"{condition.type}: {condition.message}" for condition in bad)
        return Condition(TopologyCondition.READY, False, bad[0].reason, sentences)
    reason = TopologyReason.OBSERVING
    if kubelet.observes_only:
        message = "the kubelet sets cpusets here by its static policy"
    elif enforcement is Enforcement.DRA:
        message = (
            "dra-driver-cpu sets cpusets here by the ResourceClaims of pods (enforcement dra, experimental)"
        )
    elif enforcement is Enforcement.NONE:
        reason, message = TopologyReason.NOT_ENFORCED, "containers are not kept off the CPUs that VMs own"
    else:
        reason, message = TopologyReason.ENFORCING, "containers are kept off the CPUs that VMs own"
    return Condition(TopologyCondition.READY, reason is not TopologyReason.NOT_ENFORCED, reason, message)
