"""VMIs and nodes of the in-memory cluster, as far as they decide about a live migration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvplace.kube.memory_objects import ObjectLog
from kvplace.kube.node_filters import RUNNING_VMIS, SCHEDULABLE_NODES, RunningVmi, SchedulableNode

_READY = {"conditions": [{"type": "Ready", "status": "True"}]}


class PlayedVmis:
    """The parts of VMIs and nodes that KubeVirt and Kubernetes write."""

    def __init__(self) -> None:
        super().__init__()
        self.running_vmis = ObjectLog(RUNNING_VMIS)
        self.schedulable_nodes = ObjectLog(SCHEDULABLE_NODES)

    def put_running_vmi(
        self, name: str, uid: str, *, namespace: str = "default", **status_and_spec: Mapping[str, Any]
    ) -> None:
        """Create or replace a VMI that runs and may migrate, but for what the given parts of it state."""
        document: dict[str, Any] = {
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "spec": status_and_spec.get("spec", {}),
            "status": {
                "phase": "Running",
                "conditions": [{"type": "LiveMigratable", "status": "True"}],
                **status_and_spec.get("status", {}),
            },
        }
        self.running_vmis.put(uid, msgspec.convert(document, RunningVmi))

    def put_schedulable_node(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        allocatable: Mapping[str, str] | None = None,
        **spec: object,
    ) -> None:
        """Create or replace what kube-scheduler reads of a node: it is Ready, and virt-handler runs on it."""
        metadata = {"name": name, "labels": {"kubevirt.io/schedulable": "true", **(labels or {})}}
        document = {"metadata": metadata, "spec": spec, "status": {**_READY, "allocatable": allocatable}}
        self.schedulable_nodes.put(name, msgspec.convert(document, SchedulableNode))
