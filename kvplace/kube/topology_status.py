"""The status of a NodeTopology as its agent writes it; `objects` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.enforcement import Enforcement
from kvplace.core.free_resources import CpuUsage
from kvplace.core.memory_in_use import NOTHING_IN_USE, MemoryInUse
from kvplace.core.node_devices import DeviceReport
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.kube.object_records import Condition, PodReport

MAX_PODS = 1024
"""Entries that the CRD allows; a node has a tenth of it."""


@dataclass(frozen=True, slots=True)
class TopologyStatus:
    """Everything that the agent observes; equal values need no write."""

    observed_generation: int = 0
    """Generation of the spec that the agent has seen."""
    enforcement: Enforcement = Enforcement.NONE
    kubelet_cpus: CpuMask = NO_CPUS
    """CPUs that the kubelet's static policy has allocated."""
    usage: CpuUsage | None = None
    """How many CPUs are used and free; for people, and up to some seconds old."""
    pods: tuple[PodReport, ...] = ()
    in_use: MemoryInUse = NOTHING_IN_USE
    devices: DeviceReport | None = None
    """None while nothing is known of the devices."""
    conditions: tuple[Condition, ...] = ()
    changed: Mapping[str, datetime] = field(default_factory=dict)
    """When the status of each condition last changed, by its type."""

    def document(self) -> dict[str, Any]:
        """Write it as JSON: every field, so that a merge patch replaces what is stored."""
        return {
            "observedGeneration": self.observed_generation,
            "enforcement": self.enforcement.value,
            "kubeletCpus": format_cpu_list(self.kubelet_cpus),
            "usage": None if self.usage is None else self.usage.document(),
            "inUse": self.in_use.document(),
            "devices": None if self.devices is None else self.devices.document(),
            "pods": [_pod_document(pod) for pod in self.pods[:MAX_PODS]],
            "conditions": [
                {
                    **condition.document(self.changed[condition.type]),
                    "observedGeneration": self.observed_generation,
                }
                for condition in self.conditions
            ],
        }


def transition_times(
    before: TopologyStatus | None, conditions: Iterable[Condition], now: datetime
) -> dict[str, datetime]:
    """Return when the status of each condition last changed, given the status written before."""
    old = {} if before is None else {found.type: found.status for found in before.conditions}
    changed = {} if before is None else before.changed
    return {
        found.type: changed[found.type] if found.type in old and old[found.type] == found.status else now
        for found in conditions
    }


def _pod_document(pod: PodReport) -> dict[str, Any]:
    document = {
        "uid": pod.uid,
        "namespace": pod.namespace,
        "pod": pod.pod,
        "running": pod.running,
        "pinned": pod.pinned,
        "cpus": format_cpu_list(pod.cpus),
        "drift": pod.drift[:1024],
    }
    # Revisions begin at 1; 0 means none and is left out.
    optional = {
        "revision": pod.revision,
        "failedRevision": pod.failed_revision,
        "restoredPlacement": pod.restored_placement,
    }
    return {**document, **{key: value for key, value in optional.items() if value}}
