"""A VirtualMachineInstance as far as it decides about a live migration, and its possible nodes.

It is read when a VM fits nowhere, not watched: migrations are rare, and the VMIs of a cluster change all the
time. No HTTP client is loaded with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvplace.core.scalars import NodeName
from kvplace.kube.node_filters import PodDemands, SchedulableNode, beside_virt_handler, obstacle
from kvplace.kube.object_parts import ApiObject, ConditionObject
from kvplace.kube.objects import ObjectMeta
from kvplace.kube.watches import NAME_FIELD, Kind

_CHANGES = ("HotVCPUChange", "HotMemoryChange", "MigrationRequired", "VolumesChange")
"""Conditions of a VMI when KubeVirt itself is about to migrate it."""
_HOST_MODEL = "host-model-cpu.node.kubevirt.io/"
_REQUIRED_FEATURE = "host-model-required-features.node.kubevirt.io/"
_VENDOR = "cpu-vendor.node.kubevirt.io/"
_LIKE_SOURCE = {
    _HOST_MODEL: "cpu-model-migration.node.kubevirt.io/",
    _REQUIRED_FEATURE: "cpu-feature.node.kubevirt.io/",
}
"""Labels of the source, each with its label on the target of a host-model VM."""


class _MigrationState(ApiObject, frozen=True):
    completed: bool = False
    failed: bool = False


class _VmiCpu(ApiObject, frozen=True):
    model: str = ""


class _VmiDomain(ApiObject, frozen=True):
    cpu: _VmiCpu | None = None


class _RunningSpec(PodDemands, frozen=True):
    domain: _VmiDomain = _VmiDomain()


class _VmiStatus(ApiObject, frozen=True):
    phase: str = ""
    evacuation_node_name: str = ""
    conditions: tuple[ConditionObject, ...] | None = None
    migration_state: _MigrationState | None = None


class RunningVmi(ApiObject, frozen=True):
    """A VirtualMachineInstance, as far as it decides about a migration."""

    metadata: ObjectMeta
    spec: _RunningSpec = _RunningSpec()
    status: _VmiStatus = _VmiStatus()

    @property
    def uid(self) -> str:
        """Its UID."""
        return self.metadata.uid

    @property
    def asking(self) -> Mapping[str, str]:
        """The annotations with its request."""
        return {} if self.metadata.annotations is None else self.metadata.annotations.asking

    @property
    def is_evacuated(self) -> bool:
        """Whether its node is being emptied."""
        return bool(self.status.evacuation_node_name)

    @property
    def has_just_started(self) -> bool:
        """Whether KubeVirt has not stated yet if it can migrate."""
        return all(one.type != "LiveMigratable" for one in self.status.conditions or ())

    @property
    def obstacle(self) -> str:
        """The reason why it cannot migrate now, in one clause; empty if it can."""
        conditions = {one.type: one for one in self.status.conditions or ()}
        migratable, state = conditions.get("LiveMigratable"), self.status.migration_state
        under_way = [kind for kind in _CHANGES if kind in conditions and conditions[kind].status == "True"]
        if self.status.phase != "Running" or self.metadata.deletion_timestamp is not None:
            return "it does not run"
        if migratable is None or migratable.status != "True":
            reason = (
                migratable.reason if migratable is not None and migratable.reason else "no reason is given"
            )
            return f"it is not LiveMigratable ({reason})"
        if under_way:
            return f"KubeVirt is about to migrate it ({under_way[0]})"
        if state is not None and not (state.completed or state.failed):
            return "it migrates already"
        return ""

    def obstacle_on(self, target: SchedulableNode, source: SchedulableNode) -> str:
        """State why its new pod would not be scheduled on a node, apart from cores; empty if it would be.

        KubeVirt adds the CPU model and vendor of the source to the node selector of the new pod.
        """
        there = target.metadata.labels or {}
        model = self.spec.domain.cpu.model if self.spec.domain.cpu is not None else ""
        for label, value in (source.metadata.labels or {}).items():
            wanted = label if label.startswith(_VENDOR) else ""
            for prefix, selected in _LIKE_SOURCE.items() if model in ("", "host-model") else ():
                if label.startswith(prefix):
                    wanted = selected + label.removeprefix(prefix)
            if wanted and there.get(wanted) != value:
                return f"the node does not have the label {wanted}={value}"
        return obstacle(target, beside_virt_handler(self.spec))


RUNNING_VMIS: Kind[str, RunningVmi] = Kind("virtualmachineinstances", lambda vmi: vmi.metadata.uid, {})
SCHEDULABLE_NODES: Kind[NodeName, SchedulableNode] = Kind(
    "nodes",
    lambda node: NodeName(node.metadata.name),
    {NAME_FIELD: lambda node: node.metadata.name},
)
