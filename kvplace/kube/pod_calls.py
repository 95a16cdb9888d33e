"""The calls that change pods, as values; `ApiCluster` makes them.

Every call names its pod by the UID: a pod that was created again under the same name is another pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.kube.session import METADATA_ONLY, STRATEGIC_MERGE_PATCH, Call, path_of

_encode = msgspec.json.encode


def bind_call(namespace: str, pod: str, uid: PodUid, node: NodeName, annotations: Mapping[str, str]) -> Call:
    """Bind a pod and put annotations on it."""
    return Call(
        "create",
        "pods/binding",
        pod_path(namespace, pod, "binding"),
        name=f"{namespace}/{pod}",
        body=_encode(
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {
                    "name": pod,
                    "namespace": namespace,
                    "uid": uid,
                    "annotations": dict(annotations),
                },
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            }
        ),
    )


def annotate_call(
    namespace: str,
    pod: str,
    uid: PodUid,
    annotations: Mapping[str, str | None],
    written_by: Mapping[str, str],
) -> Call:
    """Set annotations of a pod, None removes one; others stay."""
    return Call(
        "patch",
        "pods",
        pod_path(namespace, pod),
        name=f"{namespace}/{pod}",
        query=written_by,
        body=_encode({"metadata": {"uid": uid, "annotations": dict(annotations)}}),
        accept=METADATA_ONLY,
    )


def annotate_vm_call(pod: PodRecord, key: str, value: str | None, written_by: Mapping[str, str]) -> Call:
    """Set an annotation of the VMI of a pod, or of a plain pod; None removes it."""
    if not pod.vmi:
        return annotate_call(pod.namespace, pod.name, pod.uid, {key: value}, written_by)
    vmis = "virtualmachineinstances"
    return Call(
        "patch",
        vmis,
        path_of("apis", "kubevirt.io", "v1", "namespaces", pod.namespace, vmis, pod.vmi),
        name=f"{pod.namespace}/{pod.vmi}",
        query=written_by,
        body=_encode({"metadata": {"uid": pod.vmi_uid, "annotations": {key: value}}}),
        accept=METADATA_ONLY,
    )


def condition_call(pod: PodRecord, condition: Mapping[str, Any], written_by: Mapping[str, str]) -> Call:
    """Set a condition in a pod's status; conditions of other types stay."""
    return _status_call(pod, {"uid": pod.uid}, {"conditions": [condition]}, written_by)


def nominate_call(pod: PodRecord, node: NodeName, written_by: Mapping[str, str]) -> Call:
    """Nominate a node for a pod that is still as `pod` states."""
    still = {"uid": pod.uid, "resourceVersion": pod.resource_version}
    return _status_call(pod, still, {"nominatedNodeName": node}, written_by)


def resize_call(pod: PodRecord, container: str, millicores: int, written_by: Mapping[str, str]) -> Call:
    """Let a container of a pod that runs request other CPUs."""
    resources = {"requests": {"cpu": f"{millicores}m"}}
    changed = {"containers": [{"name": container, "resources": resources}]}
    return Call(
        "patch",
        "pods/resize",
        pod_path(pod.namespace, pod.name, "resize"),
        name=f"{pod.namespace}/{pod.name}",
        query=written_by,
        body=_encode({"metadata": {"uid": pod.uid}, "spec": changed}),
        accept=METADATA_ONLY,
        patch_type=STRATEGIC_MERGE_PATCH,
    )


def pod_path(namespace: str, pod: str, *subresource: str) -> str:
    """State where a pod, or a subresource of it, is."""
    return path_of("api", "v1", "namespaces", namespace, "pods", pod, *subresource)


def _status_call(
    pod: PodRecord, metadata: Mapping[str, str], status: Mapping[str, Any], written_by: Mapping[str, str]
) -> Call:
    return Call(
        "patch",
        "pods/status",
        pod_path(pod.namespace, pod.name, "status"),
        name=f"{pod.namespace}/{pod.name}",
        query=written_by,
        body=_encode({"metadata": metadata, "status": status}),
        accept=METADATA_ONLY,
        patch_type=STRATEGIC_MERGE_PATCH,
    )
