"""The status that virt-handler writes into a VMI, for hollow nodes, where no virt-handler runs."""

from __future__ import annotations

from typing import Any

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane
from harness.control_plane.kubevirt_parts import NAMESPACE as KUBEVIRT
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.kvplace_cluster.vms import VMIS

Json = dict[str, Any]


def report_running(cluster: ControlPlane, virt: KubeVirt, namespace: str, name: str, **status: Any) -> Json:
    """Report a guest that runs and can migrate, once its pod has started; return its VMI."""
    vmi = virt.vmi_in_phase(namespace, name, "Scheduled")
    # virt-controller's JSON patches test the whole list, with times as null where they are absent.
    now = vmi["metadata"]["creationTimestamp"]
    times = {"lastProbeTime": now, "lastTransitionTime": now}
    migratable = {"type": "LiveMigratable", "status": "True", **times}
    reported = {
        "phase": "Running",
        "selinuxContext": "none",
        "conditions": [*vmi["status"].get("conditions", []), migratable],
        **status,
    }
    # KubeVirt's admission drops what others write into the status of a VMI.
    cluster.request(
        "PATCH",
        f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMIS}/{name}",
        {"status": reported},
        content_type=MERGE_PATCH,
        token=cluster.service_account_token(KUBEVIRT, "kubevirt-controller"),
    )
    return virt.vmi_in_phase(namespace, name, "Running")
