"""VMs for tests of the whole way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VMS = "virtualmachines"
VMIS = "virtualmachineinstances"

ONE_SOCKET = {"cpu-set": "one-socket"}


def vmi_manifest(
    name: str, *, cores: int = 4, annotations: Mapping[str, str] = ONE_SOCKET, **spec: Any
) -> dict[str, Any]:
    """Write a VMI; `spec` adds to its spec or replaces fields of it."""
    domain = {"cpu": {"cores": cores}, "memory": {"guest": "1Gi"}, "devices": {}, **spec.pop("domain", {})}
    return {
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name, "annotations": dict(annotations)},
        "spec": {"domain": domain, "terminationGracePeriodSeconds": 0, **spec},
    }


def vm_manifest(
    name: str, *, cores: int = 4, annotations: Mapping[str, str] = ONE_SOCKET, **spec: Any
) -> dict[str, Any]:
    """Write a VM that runs at once; its request stands on its template."""
    vmi = vmi_manifest(name, cores=cores, annotations=annotations, **spec)
    return {
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {
            "runStrategy": "Always",
            "template": {"metadata": {"annotations": dict(annotations)}, "spec": vmi["spec"]},
        },
    }
