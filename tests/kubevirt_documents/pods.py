"""Making the virt-launcher pods, with KubeVirt's admission and its virt-controller."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import yaml

from harness.control_plane.kubevirt_parts import FEATURE_GATES, KubeVirt
from tests.kubevirt_documents import PODS

Json = dict[str, Any]
VMIS: dict[str, Json] = {
    vmi.pop("name"): vmi
    for vmi in yaml.safe_load((PODS.parent / "vmis_of_pods.yaml").read_text(encoding="utf-8"))
}
HOOK = {
    "image": "registry/kvplace-hook:v1",
    "imagePullPolicy": "IfNotPresent",
    "args": ["--version", "v1alpha3"],
}
WRITTEN_BY_THE_API_SERVER = (
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "managedFields",
    "generation",
    "name",
)


def kept(name: str) -> str:
    """Read a pod that is kept."""
    return (PODS / f"virt-launcher-{name}.pod.json").read_text(encoding="utf-8")


def made(kubevirt: KubeVirt, namespace: str) -> dict[str, str]:
    """Create all VMIs, and return the text of the pod of each."""
    texts: dict[str, str] = {}
    try:
        for root in (False, True):
            gates = (*FEATURE_GATES, *(["Root"] if root else []))
            kubevirt.configure(gates, {"vmRolloutStrategy": "Stage"})
            for name in (name for name, vmi in VMIS.items() if vmi.get("root", False) == root):
                vmi = _created(kubevirt, namespace, name, root=root)
                texts[name] = text_of(kubevirt.launcher_pod(namespace, name), vmi, namespace)
    finally:
        kubevirt.configure()
    return texts


def _created(kubevirt: KubeVirt, namespace: str, name: str, *, root: bool) -> Json:
    """Create a VMI, again until KubeVirt has read its configuration."""
    for _ in range(600):
        vmi = kubevirt.create("virtualmachineinstances", namespace, manifest(name))
        if (vmi.get("status", {}).get("runtimeUser", 0) == 0) == root:
            return vmi
        path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances"
        kubevirt.plane.request("DELETE", f"{path}/{name}")
        while any(left["metadata"]["name"] == name for left in kubevirt.plane.request("GET", path)["items"]):
            time.sleep(0.1)
    raise TimeoutError(f"KubeVirt does not take up the feature gate Root for {name}")


def manifest(name: str) -> Json:
    """Write the VMI as a user does."""
    vmi = {key: value for key, value in VMIS[name].items() if key != "root"}
    annotations = vmi.pop("annotations", {})
    if "-hook" in name:
        annotations = {**annotations, "hooks.kubevirt.io/hookSidecars": json.dumps([HOOK])}
    devices = {
        "disks": [{"name": "rootdisk", "disk": {"bus": "virtio"}}],
        "interfaces": [{"name": "default", "masquerade": {}}],
    }
    return {
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name, "labels": {"app": "demo"}, "annotations": annotations},
        "spec": {
            **vmi,
            "architecture": "amd64",
            "domain": {**vmi["domain"], "devices": devices},
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [
                {"name": "rootdisk", "containerDisk": {"image": "quay.io/containerdisks/fedora:latest"}}
            ],
            "terminationGracePeriodSeconds": 30,
        },
    }


def text_of(pod: Json, vmi: Json, namespace: str) -> str:
    """Write a pod as it was created, with names and UIDs that are the same each time."""
    pod = {key: pod[key] for key in ("apiVersion", "kind", "metadata", "spec")}
    for key in WRITTEN_BY_THE_API_SERVER:
        pod["metadata"].pop(key, None)
    del pod["metadata"]["namespace"]
    name = vmi["metadata"]["name"]
    text = json.dumps(pod, indent=1, sort_keys=True)
    text = re.sub(r'"(2[4-9]\d|3[0-5]\d)s"', '"300s"', text)  # the patience of QEMU, drawn by lot
    return text.replace(vmi["metadata"]["uid"], f"uid-{name}").replace(namespace, "default") + "\n"
