"""The conditions that the agent reports: every type and every reason in one place.

The pages docs/agent.md and docs/troubleshoot.md give an action for each reason; tests compare them with these
enums. `kvplace.io/Pinned` is a condition of pods, all others are conditions of the NodeTopology.
"""

from __future__ import annotations

from enum import StrEnum

from kvplace.core.well_known_names import NO_LONGER_RUNNING


class TopologyCondition(StrEnum):
    """Types of the conditions of a NodeTopology."""

    READY = "Ready"
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
